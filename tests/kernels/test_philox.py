"""Keyed draws: the published vectors, and independence of everything that must not matter."""

import itertools
import math

import pytest
import torch

from qerl.kernels import philox

ALL_ONES = 0xFFFFFFFF

# Random123's kat_vectors, lines `philox4x32 10`.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ALL_ONES,) * 4, (ALL_ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def by_hand(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox-4x32-10 with Python's unbounded integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & ALL_ONES, (p0 >> 32) ^ c3 ^ k1, p0 & ALL_ONES
        k0, k1 = (k0 + 0x9E3779B9) & ALL_ONES, (k1 + 0xBB67AE85) & ALL_ONES
    return c0, c1, c2, c3


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers_of_random123(counter, key, expected):
    assert tuple(philox.philox4x32(torch.tensor(counter), key).tolist()) == expected


def test_words_equal_unbounded_integer_arithmetic():
    generator = torch.Generator().manual_seed(0)
    counters = torch.randint(0, 1 << 32, (50, 4), generator=generator)
    key = (0xDEADBEEF, 0x12345678)
    expected = [list(by_hand(tuple(row), key)) for row in counters.tolist()]
    assert philox.philox4x32(counters, key).tolist() == expected


def test_the_key_depends_on_the_whole_seed_and_on_the_name():
    seeds = (0, 1, 2**32, 2**32 + 1, 2**63, 12, 123)
    keys = {philox.stream_key(seed, name) for seed, name in itertools.product(seeds, ("noise", "sample", "3:noise"))}
    assert len(keys) == 3 * len(seeds)
    assert all(0 <= word <= ALL_ONES for key in keys for word in key)


KEY_OF_NOISE = (0x23F793B9, 0x3F0D8E07)
FIRST_NOISE = ["0.001643", "-1.600063", "-2.439097"]


def test_the_key_of_a_stream_never_changes():
    """Committed runs are replayed by key: a new hash would silently change every draw."""
    assert philox.stream_key(0, "noise") == KEY_OF_NOISE
    assert [f"{z:.6f}" for z in philox.normal(0, "noise", 3, c1=1, c3=2).tolist()] == FIRST_NOISE


@pytest.mark.parametrize("draw", [philox.words, philox.uniform, philox.normal])
def test_a_value_does_not_depend_on_how_many_are_drawn(draw):
    long = draw(3, "s", 1001, c1=5, c2=6, c3=7)
    for n in (1, 2, 3, 4, 5, 17, 1000):
        assert torch.equal(draw(3, "s", n, c1=5, c2=6, c3=7), long[:n])


def test_element_i_comes_from_block_i_over_4():
    words = philox.words(9, "s", 10, c1=1, c2=2, c3=3)
    key = philox.stream_key(9, "s")
    assert words.tolist() == [by_hand((i // 4, 1, 2, 3), key)[i % 4] for i in range(10)]


def test_uniform_at_is_the_first_word_of_each_block_whatever_the_batch():
    c0, c1 = torch.arange(6), torch.tensor([[10], [ALL_ONES]])
    grid = philox.uniform_at(4, "sample", c0, c1, 2, 0)
    assert grid.shape == (2, 6)
    assert grid.dtype == torch.float32
    for row, key in enumerate(c1.flatten().tolist()):
        for column in range(6):
            alone = philox.uniform_at(4, "sample", column, key, 2, 0)
            word = by_hand((column, key, 2, 0), philox.stream_key(4, "sample"))[0]
            assert grid[row, column] == alone == ((word >> 9) + 0.5) / 2**23


def test_uniform_is_exact_in_float32_and_never_0_or_1():
    u = philox.uniform(0, "u", 4096)
    cells = u.double() * 2**23 - 0.5
    assert torch.equal(cells, cells.round())
    lowest, highest = (torch.tensor(((word >> 9) + 0.5) * 2.0**-23).float() for word in (0, ALL_ONES))
    assert lowest > 0
    assert highest < 1


def test_normals_have_the_moments_and_the_distribution_of_a_normal():
    n = 200_000
    z = philox.normal(1, "z", n).double()
    # Four standard errors of each estimate.
    assert abs(z.mean()) < 4 / math.sqrt(n)
    assert abs(z.var() - 1) < 4 * math.sqrt(2 / n)
    assert abs((z**3).mean()) < 4 * math.sqrt(15 / n)
    assert abs((z**4).mean() - 3) < 4 * math.sqrt(96 / n)
    # Kolmogorov-Smirnov distance; 1.95 / sqrt(n) is exceeded with probability .001.
    distance = (torch.special.ndtr(z.sort().values) - (torch.arange(n) + 0.5) / n).abs().max()
    assert distance < 1.95 / math.sqrt(n)


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"stream": "b"},
        {"c1": 1},
        {"c2": 1},
        {"c3": 1},
    ],
)
def test_streams_and_counters_are_uncorrelated(other):
    n = 50_000
    base = {"seed": 0, "stream": "a", "c1": 0, "c2": 0, "c3": 0}
    x, y = (philox.normal(n=n, **settings).double() for settings in (base, base | other))
    assert abs((x * y).mean()) < 4 / math.sqrt(n)


def test_neighbours_are_uncorrelated():
    z = philox.normal(0, "a", 50_000).double()
    for lag in (1, 2, 3, 4):
        assert abs((z[:-lag] * z[lag:]).mean()) < 4 / math.sqrt(50_000)


def test_drawing_touches_no_global_generator():
    before = torch.random.get_rng_state()
    philox.normal(0, "a", 10)
    philox.permutation(0, "a", 10)
    assert torch.equal(before, torch.random.get_rng_state())


def test_permutations_are_permutations_and_keyed():
    first = philox.permutation(0, "order", 1000)
    assert torch.equal(first.sort().values, torch.arange(1000))
    assert torch.equal(first, philox.permutation(0, "order", 1000))
    assert not torch.equal(first, philox.permutation(0, "order", 1000, c1=1))
    assert philox.permutation(0, "order", 0).numel() == 0


def test_every_permutation_of_three_is_equally_likely():
    counts: dict[tuple[int, ...], int] = {}
    for epoch in range(1200):
        order = tuple(philox.permutation(0, "order", 3, c1=epoch).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    # Chi-square with five degrees of freedom: 20.5 is exceeded with probability .001.
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 20.5


def test_a_counter_beyond_32_bits_is_a_bug_not_a_repeat():
    with pytest.raises(AssertionError, match="32 bits"):
        philox.words(0, "s", 4, c1=1 << 32)

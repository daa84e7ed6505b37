"""The sampler against a float64 oracle that loops over tokens, and against answers worked out by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl.errors import ConfigError
from qerl.kernels import philox
from qerl.kernels.sampling import BLOCK, reference
from qerl.records import SamplingSpec
from qerl.rollout.sampler import answer_uniforms, check_sampling, choose, support

LARGEST_UNIFORM = 1 - 2.0**-24
SMALLEST_UNIFORM = 2.0**-24


def oracle(logits, spec, uniform):
    """(token, behavior logprob, sampler logprob, kept tokens) of one row, by the definitions, in float64."""
    probabilities = np.exp((logits - logits.max()) / spec.temperature)
    probabilities /= probabilities.sum()
    likeliest_first = sorted(range(len(logits)), key=lambda token: (-probabilities[token], token))
    kept = [token for token in likeliest_first if probabilities[token] > 0]
    if 0 < spec.top_k < len(logits):
        bar = probabilities[likeliest_first[spec.top_k - 1]]
        kept = [token for token in kept if probabilities[token] >= bar]
    if spec.top_p < 1:
        mass, whole, nucleus = 0.0, sum(probabilities[token] for token in kept), []
        for token in kept:
            if mass >= spec.top_p * whole:
                break
            nucleus.append(token)
            mass += probabilities[token]
        kept = nucleus
    kept = [token for token in kept if probabilities[token] >= spec.min_p * probabilities.max()]
    whole = sum(probabilities[token] for token in kept)
    reached = 0.0
    for token in sorted(kept):
        reached += probabilities[token]
        if reached > uniform * whole:
            break
    return token, math.log(probabilities[token]), math.log(probabilities[token] / whole), set(kept)


def supports(logits_BV, spec):
    """The kept tokens of each row, as sets."""
    weights_BV = ((logits_BV - logits_BV.amax(-1, keepdim=True)) / spec.temperature).exp()
    return [set(row.nonzero()[:, 0].tolist()) for row in support(logits_BV, weights_BV, spec)]


SPECS = [
    SamplingSpec(),
    SamplingSpec(temperature=0.7),
    SamplingSpec(temperature=2.5),
    SamplingSpec(top_k=1),
    SamplingSpec(top_k=17),
    SamplingSpec(top_p=0.5),
    SamplingSpec(top_p=0.95, temperature=1.3),
    SamplingSpec(min_p=0.1),
    SamplingSpec(top_k=40, top_p=0.8, min_p=0.02, temperature=0.9),
]


@pytest.mark.parametrize(
    "spec", SPECS, ids=lambda spec: f"T{spec.temperature}-k{spec.top_k}-p{spec.top_p}-m{spec.min_p}"
)
@pytest.mark.parametrize("vocabulary", [57, BLOCK, 3 * BLOCK + 5])
def test_tokens_and_both_logprobs_equal_the_float64_oracle(spec, vocabulary, monkeypatch):
    monkeypatch.setattr(reference, "SUMMED_AT_ONCE", 1000)  # rows in several groups, the last of them smaller
    generator = np.random.default_rng(vocabulary)
    logits = (generator.standard_normal((64, vocabulary)) * 3).astype(np.float32)
    uniforms = generator.random(64).astype(np.float32)
    chosen = choose(torch.from_numpy(logits), spec, torch.from_numpy(uniforms))
    expected = [oracle(row.astype(np.float64), spec, float(u)) for row, u in zip(logits, uniforms, strict=True)]
    assert chosen.tokens_B.tolist() == [row[0] for row in expected]
    assert chosen.behavior_logprobs_B.numpy() == pytest.approx([row[1] for row in expected], abs=2e-6)
    assert chosen.sampler_logprobs_B.numpy() == pytest.approx([row[2] for row in expected], abs=2e-6)
    assert chosen.behavior_logprobs_B.dtype == chosen.sampler_logprobs_B.dtype == torch.float32
    assert supports(torch.from_numpy(logits), spec) == [row[3] for row in expected]


HAND = torch.tensor([[0.125, 0.5, 0.125, 0.25]]).log()


@pytest.mark.parametrize(
    ("spec", "kept"),
    [
        (SamplingSpec(), {0, 1, 2, 3}),
        (SamplingSpec(top_p=0.5), {1}),  # 1/2 reaches the mass by itself
        (SamplingSpec(top_p=0.51), {1, 3}),  # the token that crosses p belongs to the set
        (SamplingSpec(top_p=0.8), {0, 1, 3}),  # of the equal ones, the lowest index
        (SamplingSpec(top_k=2), {1, 3}),
        (SamplingSpec(top_k=3), {0, 1, 2, 3}),  # a tie at the k-th place keeps both
        (SamplingSpec(top_k=9), {0, 1, 2, 3}),
        (SamplingSpec(top_k=2, top_p=0.6), {1}),  # 1/2 is 2/3 of what top-k left
        (SamplingSpec(min_p=0.5), {1, 3}),
        (SamplingSpec(min_p=0.51), {1}),
        (SamplingSpec(min_p=1.0), {1}),
        (SamplingSpec(min_p=0.5, temperature=0.5), {1}),  # at T = 1/2 the second is 1/4 as likely as the first
    ],
)
def test_truncations_keep_the_sets_worked_out_by_hand(spec, kept):
    assert supports(HAND, spec) == [kept]


@pytest.mark.parametrize(("uniform", "token"), [(0.1, 0), (0.126, 1), (0.62, 1), (0.63, 2), (0.76, 3), (0.99, 3)])
def test_tokens_lie_on_the_unit_interval_in_vocabulary_order(uniform, token):
    assert choose(HAND, SamplingSpec(), torch.tensor([uniform])).tokens_B.item() == token


def test_a_nucleus_larger_than_its_head_is_still_the_smallest_set(monkeypatch):
    monkeypatch.setattr(reference, "NUCLEUS_HEAD", 3)
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], [0.0, 9.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    for top_p in (0.3, 0.9):
        spec = SamplingSpec(top_p=top_p)
        assert supports(logits, spec) == [oracle(row.numpy().astype(np.float64), spec, 0.5)[3] for row in logits]


def test_sampler_logprob_is_renormalized_over_what_is_kept():
    chosen = choose(HAND, SamplingSpec(top_k=2), torch.tensor([0.5]))
    assert chosen.tokens_B.item() == 1
    assert chosen.behavior_logprobs_B.item() == pytest.approx(math.log(1 / 2), abs=1e-6)
    assert chosen.sampler_logprobs_B.item() == pytest.approx(math.log(2 / 3), abs=1e-6)


@pytest.mark.parametrize("spec", [SamplingSpec(), SamplingSpec(top_p=0.9), SamplingSpec(temperature=0.3)])
def test_impossible_tokens_are_never_chosen_at_either_end(spec):
    logits = torch.full((2, 4 * BLOCK), float("-inf"))
    possible = [BLOCK + 3, BLOCK + 7, 2 * BLOCK + 11]
    logits[:, possible] = torch.tensor([0.3, -9.0, 0.1])
    chosen = choose(logits, spec, torch.tensor([SMALLEST_UNIFORM, LARGEST_UNIFORM]))
    assert chosen.tokens_B.tolist() == [possible[0], possible[-1]]
    assert torch.isfinite(chosen.behavior_logprobs_B).all()


@pytest.mark.parametrize(
    ("weights", "target", "index"),
    [
        ([1.0, 1.0], 1.0, 1),  # each token's interval holds its lower end
        ([0.0, 1.0], -1e-17, 1),  # what rounding leaves of a target may lie below 0
        ([1.0, 2.0, 0.0], 3.0, 1),  # or reach the sum
    ],
)
def test_inversion_lands_on_a_positive_weight_at_the_ends_and_under_rounding(weights, target, index):
    found, _ = reference._first_above(torch.tensor([weights], dtype=torch.float64), torch.tensor([target]))
    assert found.item() == index


@given(
    st.lists(st.floats(-200, 50, width=32), min_size=2, max_size=300),
    st.sampled_from([SMALLEST_UNIFORM, 0.5, LARGEST_UNIFORM]),
    st.sampled_from(SPECS),
)
@settings(max_examples=150)
def test_a_chosen_token_is_always_in_the_support(row, uniform, spec):
    logits = torch.tensor([row])
    chosen = choose(logits, spec, torch.tensor([uniform]))
    assert chosen.tokens_B.item() in supports(logits, spec)[0]
    assert torch.isfinite(chosen.behavior_logprobs_B).all()
    assert (chosen.sampler_logprobs_B >= chosen.behavior_logprobs_B - 1e-6).all()


def test_greedy_takes_the_lowest_of_equals_with_the_logprob_of_temperature_one():
    logits = torch.tensor([[1.0, 4.0, 4.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    chosen = choose(logits, SamplingSpec(temperature=0.0), None)
    assert chosen.tokens_B.tolist() == [1, 0]
    expected = torch.log_softmax(logits.double(), -1)[[0, 1], [1, 0]]
    assert chosen.behavior_logprobs_B.tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    assert chosen.sampler_logprobs_B.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("spec", [SamplingSpec(), SamplingSpec(top_k=5, temperature=1.5)])
def test_frequencies_over_keyed_uniforms_fit_the_distribution(spec):
    draws, vocabulary = 40_000, 12
    logits = torch.linspace(-2.0, 1.0, vocabulary)
    uniforms = answer_uniforms(spec, torch.arange(draws), torch.zeros(draws, dtype=torch.int64), 1)[:, 0]
    counts = torch.bincount(choose(logits.expand(draws, -1), spec, uniforms).tokens_B, minlength=vocabulary)
    (kept,) = supports(logits[None], spec)
    weights = (logits / spec.temperature).exp() * torch.tensor([float(token in kept) for token in range(vocabulary)])
    expected = draws * weights / weights.sum()
    likely = expected > 0
    assert counts[~likely].sum() == 0
    chi_square = float(((counts - expected)[likely] ** 2 / expected[likely]).sum())
    freedom = int(likely.sum()) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def test_a_row_is_chosen_the_same_alone_and_in_a_batch(monkeypatch):
    monkeypatch.setattr(reference, "SUMMED_AT_ONCE", 7000)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(33, 1000, generator=generator)
    uniforms = torch.rand(33, generator=generator)
    for spec in (SamplingSpec(), SamplingSpec(top_p=0.8, temperature=0.7)):
        together = choose(logits, spec, uniforms)
        for row in (0, 17, 32):
            alone = choose(logits[row : row + 1], spec, uniforms[row : row + 1])
            for one, many in zip(alone, together, strict=True):
                assert torch.equal(one[0], many[row])


def test_nothing_is_sorted_without_truncation(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("sorted")

    for name in ("sort", "argsort", "topk"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    assert choose(HAND, SamplingSpec(), torch.tensor([0.3])).tokens_B.item() == 1


def test_logits_are_left_as_they_were():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(2))
    before = logits.clone()
    choose(logits, SamplingSpec(temperature=0.5, top_p=0.5), torch.full((4,), 0.5))
    assert torch.equal(logits, before)


def test_not_a_number_gives_logprobs_that_show_it():
    logits = torch.tensor([[0.0, float("nan"), 1.0], [0.0, 1.0, 2.0]])
    for spec in (SamplingSpec(), SamplingSpec(temperature=0.0)):
        chosen = choose(logits, spec, torch.tensor([0.5, 0.5]))
        assert chosen.behavior_logprobs_B.isnan().tolist() == [True, False]


def test_random_numbers_belong_to_sample_and_position_whenever_drawn():
    spec = SamplingSpec(seed=5, stream="sample", rollout=3)
    keys, positions = torch.tensor([7, 2**31, 9]), torch.tensor([0, 4, 100])
    window = answer_uniforms(spec, keys, positions, 6)
    for row, (key, start) in enumerate(zip(keys.tolist(), positions.tolist(), strict=True)):
        for offset in range(6):
            counter = torch.tensor([[start + offset, key, 3, 0]])
            word = philox.philox4x32(counter, philox.stream_key(5, "sample"))[0, 0].item()
            assert window[row, offset].item() == ((word >> 9) + 0.5) * 2.0**-23


def test_random_numbers_differ_by_seed_stream_and_rollout():
    keys, positions = torch.arange(50), torch.zeros(50, dtype=torch.int64)
    base = SamplingSpec(seed=1, stream="sample", rollout=1)
    others = [
        SamplingSpec(seed=2, stream="sample", rollout=1),
        SamplingSpec(seed=1, stream="eval", rollout=1),
        SamplingSpec(seed=1, stream="sample", rollout=2),
    ]
    for other in others:
        assert (answer_uniforms(base, keys, positions, 1) != answer_uniforms(other, keys, positions, 1)).sum() >= 49


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": 1e-9},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"min_p": 1.1},
        {"max_new_tokens": 0},
    ],
)
def test_a_setting_without_meaning_is_refused_by_name(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        check_sampling(SamplingSpec(**bad))

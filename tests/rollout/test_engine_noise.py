"""Noise of every scope in the engine: the same answer in any batch, and the same log-probs when the trainer replays it."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from rollout_builders import load_tiny, make_prompts

from qerl import memory
from qerl.config.load import load_config
from qerl.kernels.rms_norm import KeyedNoise, TableNoise
from qerl.model.aqn import NoiseState
from qerl.model.aqn import noise as aqn_noise
from qerl.model.attention import SampleRows
from qerl.model.tokenizer import load_tokenizer
from qerl.objective.batch import Sample, pack
from qerl.records import SamplingSpec
from qerl.rollout import row_noise, workspace
from qerl.rollout.engine import Engine
from qerl.rollout.kv_cache import KVCache
from qerl.rollout.scheduler import Scheduler
from qerl.rollout.sequence import Sequence
from qerl.train.learn import policy_logprobs

SCOPES = ("rollout", "group", "response", "token")
RAGGED, GROUP = (5, 1, 17, 9), 4
SPEC = SamplingSpec(max_new_tokens=14, seed=4)

BATCH_TOLERANCE = 1e-5
"""float32 log-probs of an answer in different batches."""

REPLAY_TOLERANCE = 1e-4
"""|ratio - 1| of trainer to engine, float32; measured: 5e-6."""


@pytest.fixture(scope="module")
def tokenizer(qwen2_folder):
    return load_tokenizer(qwen2_folder)


@pytest.fixture(scope="module")
def model(qwen2_folder):
    return load_tiny(qwen2_folder)


def make_noise(model, scope, **changes):
    settings = {"seed": 1, "rollout": 2, "stage": 1, "sigma": 0.3, "group_size": GROUP, "scope": scope}
    return NoiseState(**{**settings, "sites": ("attn_norm", "mlp_norm", "final_norm"), **changes}).materialize(model)


def generate(model, tokenizer, noise, *, rows=64, prefill_tokens=8192, **arguments):
    engine = Engine(model, tokenizer, max_num_seqs=rows, prefill_tokens=prefill_tokens)
    return engine.generate(make_prompts(RAGGED), SPEC, group_size=GROUP, noise=noise, **arguments)


def batches(completions, token_budget=10_000):
    samples = [Sample(completion=completion, advantage=1.0, in_loss=True) for completion in completions]
    return list(pack(samples, token_budget, torch.device("cpu")))


@torch.no_grad()
def ratios(model, completions, noise, token_budget=10_000):
    """Ratio of trainer to engine probability of every answer token."""
    found = [
        torch.exp(policy_logprobs(model, batch, 1.0, noise=noise)[0] - batch.behavior_logprobs_N)
        for batch in batches(completions, token_budget)
    ]
    return torch.cat(found)


def assert_same_answers(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert (one.sample_key, one.token_ids) == (other.sample_key, other.token_ids)
        assert one.behavior_logprobs == pytest.approx(other.behavior_logprobs, abs=BATCH_TOLERANCE)


@pytest.mark.parametrize(("scope", "prompt"), list(itertools.product(SCOPES, ("noisy", "clean"))))
def test_an_answer_is_the_same_alone_and_in_any_batch(model, tokenizer, scope, prompt):
    noise = make_noise(model, scope, prompt=prompt)
    together, _ = generate(model, tokenizer, noise)
    for rows, prefill_tokens in ((1, 1), (3, 10)):
        again, _ = generate(model, tokenizer, noise, rows=rows, prefill_tokens=prefill_tokens)
        assert_same_answers(again, together)
    for index in (0, 6, 15):
        alone, _ = Engine(model, tokenizer).generate(
            [make_prompts(RAGGED)[index // GROUP]], SPEC, noise=noise, first_sample_key=index
        )
        assert_same_answers(alone, [together[index]])


@pytest.mark.parametrize(("scope", "prompt"), list(itertools.product(SCOPES, ("noisy", "clean"))))
@pytest.mark.parametrize("sharing", ["shared", "independent"])
def test_replayed_noise_gives_ratio_one_and_absent_noise_does_not(model, tokenizer, scope, prompt, sharing):
    noise = make_noise(model, scope, prompt=prompt, sharing=sharing)
    completions, _ = generate(model, tokenizer, noise, rows=7)
    for token_budget in (40, 10_000):
        replayed = ratios(model, completions, noise, token_budget)
        assert (replayed - 1).abs().max() <= REPLAY_TOLERANCE
    again = NoiseState.from_dict(noise.state.to_dict()).materialize(model)
    assert torch.equal(ratios(model, completions, again), replayed)
    assert (ratios(model, completions, None) - 1).abs().mean() > 0.02


@pytest.mark.parametrize("scope", SCOPES)
def test_a_recomputed_pass_over_the_same_packing_gives_the_same_bits(model, tokenizer, scope):
    noise = make_noise(model, scope)
    completions, _ = generate(model, tokenizer, noise)
    for batch in batches(completions, 60):
        with torch.no_grad():
            old_N, _ = policy_logprobs(model, batch, 1.0, noise=noise)
        new_N, _ = policy_logprobs(model, batch, 1.0, noise=noise, checkpointing="full")
        assert torch.equal(old_N, new_N.detach())


@pytest.mark.parametrize("scope", SCOPES)
def test_the_first_answer_token_comes_from_the_clean_policy_when_prompts_are_clean(model, tokenizer, scope):
    """The last prompt token is of the prompt: what it predicts sees no noise; what the first answer token predicts does."""
    noise = make_noise(model, scope, prompt="clean")
    completions, _ = generate(model, tokenizer, noise)
    first = torch.tensor([sum(len(c.token_ids) for c in completions[:i]) for i in range(len(completions))])
    gap = (ratios(model, completions, None) - 1).abs()
    assert gap[first].max() <= REPLAY_TOLERANCE
    second = (first + 1)[[len(c.token_ids) > 1 for c in completions]]
    assert gap[second].min() > REPLAY_TOLERANCE


@pytest.mark.parametrize("scope", SCOPES)
def test_prompt_keys_and_values_are_those_of_no_noise_when_prompts_are_clean(model, tokenizer, monkeypatch, scope):
    """Those of the last prompt token too, which the first decode step stores."""
    caches = []

    class KeptCache(KVCache):
        def __init__(self, **settings):
            super().__init__(**settings)
            caches.append(self)

    monkeypatch.setattr(workspace, "KVCache", KeptCache)
    one_token = SamplingSpec(max_new_tokens=1)
    for noise in (make_noise(model, scope, prompt="clean"), None):
        Engine(model, tokenizer).generate(make_prompts(RAGGED), one_token, group_size=GROUP, noise=noise)
    found, clean = (cache.slabs for cache in caches)
    for pair, clean_pair in zip(found, clean, strict=True):
        for slab, clean_slab in zip(pair, clean_pair, strict=True):
            assert clean_slab.any()
            assert torch.equal(slab, clean_slab)


@pytest.mark.parametrize(
    ("scope", "prompt", "shared"),
    [
        ("rollout", "noisy", True),
        ("group", "noisy", True),
        ("response", "noisy", False),
        ("token", "noisy", False),
        ("response", "clean", True),
        ("token", "clean", True),
    ],
)
def test_a_prompt_is_prefilled_once_where_its_answers_see_the_same_noise_there(model, tokenizer, scope, prompt, shared):
    _, stats = generate(model, tokenizer, make_noise(model, scope, prompt=prompt), rows=3)
    once = sum(length - 1 for length in RAGGED)
    assert stats["prefill_tokens"] == (once if shared else once * GROUP)


def test_sequences_of_one_prompt_with_other_prefixes_are_prefilled_each():
    sequences = [Sequence(index=i, prompt_index=0, prompt_length=5, sample_key=i, prefix_key=i // 2) for i in range(4)]
    scheduler = Scheduler(sequences, rows=3, prefill_tokens=100)
    [starts] = scheduler.admit()
    assert [(len(start.sequences), start.prefill, start.keep) for start in starts] == [
        (2, True, False),
        (1, True, True),
    ]
    scheduler.release([0])
    [[last]] = scheduler.admit()
    assert (last.sequences[0].index, last.prefill, last.keep) == (3, False, False)


@pytest.mark.parametrize("scope", ["group", "response"])
def test_tables_of_running_rows_change_nothing(model, tokenizer, monkeypatch, scope):
    noise = make_noise(model, scope)
    with_tables, _ = generate(model, tokenizer, noise, rows=3)
    monkeypatch.setattr(aqn_noise, "TABLE_BYTES", 0)
    without, _ = generate(model, tokenizer, noise, rows=3)
    assert with_tables == without


@pytest.mark.parametrize(
    ("scope", "rows", "device", "kept"),
    [
        ("response", 64, "cuda", True),
        ("group", 65, "cuda", False),
        ("response", 512, "cpu", True),
        ("response", 1 << 30, "cpu", False),
        ("token", 1, "cuda", False),
        ("rollout", 512, "cuda", True),
    ],
)
def test_draws_are_kept_where_they_last_and_rows_are_few(model, scope, rows, device, kept):
    assert row_noise.fits_tables(make_noise(model, scope), rows, torch.device(device)) == kept


@pytest.mark.parametrize("scope", ["group", "response"])
@pytest.mark.parametrize("sharing", ["shared", "independent"])
@pytest.mark.parametrize("magnitude", ["absolute", "relative"])
def test_tables_hold_the_draws_of_the_keys_and_a_refilled_row_those_of_its_new_answer(
    model, monkeypatch, scope, sharing, magnitude
):
    """Drawn as on a GPU (all places at once, two rows at a time), bit for bit what norms draw for themselves at every step."""
    changes = {"sharing": sharing, "magnitude": magnitude}
    noise = make_noise(model, scope, **changes)
    monkeypatch.setattr(row_noise, "DRAWN_BYTES", 2 * 4 * sum(noise.widths.values()))
    tables = row_noise.DecodeNoise(noise, 5, model.device)
    one_by_one = row_noise.DecodeNoise(noise, 5, model.device)
    keyed = row_noise.KeyedDecodeNoise(noise, model.device)

    def start(rows, keys):
        tables.draw_all(torch.tensor(rows), torch.tensor(keys))
        one_by_one.start(rows, keys)

    def check(keys):
        samples = SampleRows(keys_S=torch.tensor(keys), prompt_lengths_S=torch.zeros(len(keys), dtype=torch.int64))
        context = SimpleNamespace(positions_T=torch.arange(len(keys)), samples=samples)
        passes = [source.for_pass(context) for source in (tables, one_by_one, keyed)]
        for place in noise.places():
            held, alone, drawn = (seen.of_norm(*place) for seen in passes)
            assert isinstance(held, TableNoise) and isinstance(drawn, KeyedNoise)
            assert torch.equal(held.z(), drawn.z()) and torch.equal(alone.z(), drawn.z())
            assert drawn.z().any()

    start([0, 1, 2, 3, 4], [7, 8, 9, 12, 4])
    check([7, 8, 9, 12, 4])
    start([1, 3], [20, 21])
    check([7, 20, 9, 21, 4])
    tables.move(torch.tensor([4]), torch.tensor([0]))
    one_by_one.move(torch.tensor([4]), torch.tensor([0]))
    check([4, 20, 9, 21])
    # The next rollout's noise of the same answers.
    noise = make_noise(model, scope, rollout=3, **changes)
    for source in (tables, one_by_one, keyed):
        source.begin(noise)
    start([0, 1], [4, 20])
    check([4, 20])


@pytest.mark.parametrize("scope", ["group", "response"])
@pytest.mark.parametrize("prompt", ["noisy", "clean"])
def test_tables_filled_as_on_a_gpu_give_the_answers_of_draws_at_every_step(
    model, tokenizer, monkeypatch, scope, prompt
):
    """3 rows for 16 answers, so every row is filled again, and moved; two rollouts on one engine whose memory is kept."""
    found = []

    def draw_all(self, rows, keys):
        self.draw_all(torch.tensor(rows), torch.tensor(keys))

    for most in (aqn_noise.TABLE_BYTES, 0):
        monkeypatch.setattr(aqn_noise, "TABLE_BYTES", most)
        monkeypatch.setattr(row_noise.DecodeNoise, "start", draw_all)
        engine = Engine(model, tokenizer, max_num_seqs=3, paged=True, window=2)
        for rollout in (2, 3):
            noise = make_noise(model, scope, prompt=prompt, rollout=rollout)
            completions, stats = engine.generate(make_prompts(RAGGED), SPEC, group_size=GROUP, noise=noise)
            found.append(completions)
        assert stats["refills"] > 0
    assert found[:2] == found[2:]
    assert found[0] != found[1]


@pytest.mark.parametrize("scope", SCOPES)
def test_an_evaluation_with_groups_of_another_size_has_no_tables_of_its_own(model, tokenizer, scope):
    """The plan counts the tables once."""
    engine = Engine(model, tokenizer, max_num_seqs=16, paged=True)
    for group_size in (GROUP, 1, GROUP):
        noise = make_noise(model, scope, group_size=group_size)
        found, _ = engine.generate(make_prompts(RAGGED), SPEC, group_size=group_size, noise=noise)
        expected, _ = Engine(model, tokenizer).generate(make_prompts(RAGGED), SPEC, group_size=group_size, noise=noise)
        assert_same_answers(found, expected)
    assert len(engine._workspace._sources) == 1


@pytest.mark.parametrize("scope", SCOPES)
def test_sigma_zero_is_bit_identical_to_no_noise(model, tokenizer, scope):
    silent, _ = generate(model, tokenizer, make_noise(model, scope, sigma=0.0))
    assert silent == generate(model, tokenizer, None)[0]


def test_refill_rounds_of_a_rollout_have_noise_of_their_own(model, tokenizer):
    """The same prompts again in one rollout: later sample keys, the same rollout index, other noise."""
    for scope in ("group", "response", "token"):
        noise = make_noise(model, scope)
        greedy = SamplingSpec(temperature=0.0, max_new_tokens=14)
        engine = Engine(model, tokenizer)
        first, _ = engine.generate(make_prompts(RAGGED), greedy, group_size=GROUP, noise=noise)
        again, _ = engine.generate(
            make_prompts(RAGGED), greedy, group_size=GROUP, noise=noise, first_sample_key=len(first)
        )
        assert [c.behavior_logprobs for c in first] != [c.behavior_logprobs for c in again]
        if scope == "group":
            assert {len({c.token_ids for c in first[i : i + GROUP]}) for i in range(0, len(first), GROUP)} == {1}
        assert (ratios(model, again, noise) - 1).abs().max() <= REPLAY_TOLERANCE


@pytest.mark.parametrize("sharing", ["shared", "independent"])
def test_tables_take_the_memory_that_is_predicted(model, sharing):
    settings = ["aqn.scope=group", f"aqn.sharing={sharing}", "aqn.sites=[attn_norm, mlp_norm, final_norm]"]
    config = load_config(None, [*settings, "rollout.max_num_seqs=5"])
    predicted = memory.predict(config, model.spec, device_type="cpu").phases["rollout"]["noise"]
    source = row_noise.DecodeNoise(make_noise(model, "group", sharing=sharing), 5, model.device)
    assert sum(table.nbytes for table in source.tables.values()) == predicted > 0

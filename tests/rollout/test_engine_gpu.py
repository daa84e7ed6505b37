"""The engine on CUDA: captured steps against the same steps run one by one, and what must be visible without a new capture."""

import pytest
import rollout_builders
import torch
from rollout_builders import make_prompts

from qerl.config.schema import LoraConfig, QuantConfig
from qerl.kernels import sampling
from qerl.kernels.cached_attention import FP8, CacheRows, SharedPages, reference, triton
from qerl.kernels.cached_attention.plan import Plan, members_for
from qerl.kernels.philox import stream_key
from qerl.memory import measure_resident
from qerl.model.aqn import NoiseState
from qerl.model.aqn import noise as aqn_noise
from qerl.model.checkpoint import load_model
from qerl.model.tokenizer import load_tokenizer
from qerl.objective.batch import Sample, pack
from qerl.records import SamplingSpec
from qerl.rollout import row_noise, workspace
from qerl.rollout import together as together_module
from qerl.rollout.engine import Engine
from qerl.rollout.prefill import Prefill
from qerl.rollout.sampler import answer_uniforms
from qerl.train.learn import policy_logprobs

pytestmark = pytest.mark.gpu
RAGGED, GROUP = (5, 1, 17, 9, 16), 4
SPEC = SamplingSpec(max_new_tokens=18, seed=4)
WHOLE, FINE = Plan(first=1, most=1, programs=20), Plan(first=32, most=32, programs=100)
"""No context is cut; each as finely as it goes."""
KERNEL_TOLERANCE = 0.004
"""bfloat16 mean |difference of probabilities| of engine and trainer."""


@pytest.fixture(scope="module")
def tokenizer(qwen2_folder):
    return load_tokenizer(qwen2_folder)


def load(folder, dtype=torch.float32, dense_cache="on", base="nvfp4", **settings):
    quant = QuantConfig(format=base, dense_cache=dense_cache)
    lora = LoraConfig(rank=4, alpha=8.0)
    model = load_model(folder, quant=quant, lora=lora, dtype=dtype, device="cuda", **settings)
    for name, parameter in model.trainable_parameters().items():
        if "lora_b" in name:
            parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).cuda())
    return model


def make_noise(model, scope, rollout=2, sigma=0.3, prompt="noisy"):
    sites = ("attn_norm", "mlp_norm", "final_norm")
    state = NoiseState(
        seed=1, rollout=rollout, stage=1, sigma=sigma, group_size=GROUP, scope=scope, prompt=prompt, sites=sites
    )
    return state.materialize(model)


def tokens_of(completions):
    return [completion.token_ids for completion in completions]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(14, 2, 64), (28, 4, 128), (6, 3, 80)])
def test_cached_attention_equals_the_reference_at_any_length_and_split(dtype, heads, kv_heads, size):
    """The rotation is left out (cosines 1), so that the reference in float64 is float64 throughout."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32).to(dtype)

    lengths = torch.tensor([0, 63, 64, 700, 2, 333, 999, 1700], device="cuda")
    rows = CacheRows(lengths, 64, table_BN=(torch.randperm(8 * 27, device="cuda") + 1).view(8, 27).int())
    turns = torch.ones(8, size, device="cuda"), torch.zeros(8, size, device="cuda")
    qkv, caches = normal(8, (heads + 2 * kv_heads) * size), [normal(217, 64, kv_heads, size) for _ in range(2)]
    wide = [cache.double() for cache in caches]
    exact = reference.cached_attention(qkv.double(), turns, heads, kv_heads, *wide, rows, 0.1)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for plan in (None, WHOLE, FINE, Plan(first=5, most=5, programs=40), FINE):
        found = triton.cached_attention(qkv, turns, heads, kv_heads, *caches, rows, 0.1, None, plan)
        torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)
    assert all(torch.equal(cache.double(), other) for cache, other in zip(caches, wide, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(14, 2, 64), (28, 4, 128), (40, 8, 128)])
def test_rows_that_read_their_first_pages_together_get_what_they_get_alone(dtype, heads, kv_heads, size):
    """Five rows over 20 pages, three over 3, one by itself; captured too, with other lengths and groups."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32).to(dtype)

    table = (torch.randperm(9 * 27, device="cuda") + 1).view(9, 27).int()
    table[:5, :20], table[5:8, :3] = table[0, :20].clone(), table[5, :3].clone()
    lengths = torch.tensor([1280, 1281, 1500, 1700, 1400, 192, 300, 1700, 900], device="cuda")
    most = members_for(heads, kv_heads)
    members = torch.full((4, most), -1, dtype=torch.int32)
    members[0, :5], members[2, :3] = torch.tensor([3, 0, 1, 2, 4]), torch.tensor([5, 6, 7])
    pages = torch.tensor([20] * 5 + [3] * 3 + [0], device="cuda").int()
    shared = SharedPages(pages_B=pages, members_CM=members.cuda(), likely_groups=2)
    rows = CacheRows(lengths, 64, table_BN=table, shared=shared)
    turns = torch.ones(9, size, device="cuda"), torch.zeros(9, size, device="cuda")
    qkv, caches = normal(9, (heads + 2 * kv_heads) * size), [normal(244, 64, kv_heads, size) for _ in range(2)]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2

    def check(found):
        plain = CacheRows(lengths, 64, table_BN=table)
        wide = [cache.double() for cache in caches]
        exact = reference.cached_attention(qkv.double(), turns, heads, kv_heads, *wide, plain, 0.1)
        torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)

    for plan in (None, WHOLE, FINE, None):
        check(triton.cached_attention(qkv, turns, heads, kv_heads, *caches, rows, 0.1, None, plan))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = triton.cached_attention(qkv, turns, heads, kv_heads, *caches, rows, 0.1)
    graph.replay()
    check(captured)
    before = captured.clone()
    # A row's bits do not depend on who else is in its group.
    members[0, :5] = torch.tensor([4, 3, -1, -1, -1])
    shared.members_CM.copy_(members)
    pages[:3] = 0
    graph.replay()
    assert torch.equal(captured[3:], before[3:])
    lengths += 1
    qkv.mul_(0.5)
    graph.replay()
    check(captured)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tokens_and_logprobs_of_the_sampling_kernels_equal_the_reference(temperature):
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(256, 151936, generator=generator, device="cuda") * 4
    logits[:128, ::3] = float("-inf")
    keys, positions = torch.arange(256, device="cuda") * 977, torch.arange(256, device="cuda") % 31
    spec = SamplingSpec(seed=3, rollout=9)
    key_3 = torch.tensor([*stream_key(spec.seed, spec.stream), spec.rollout], device="cuda")
    uniforms = sampling.keyed_uniforms(key_3, positions, keys)
    assert torch.equal(uniforms, answer_uniforms(spec, keys, positions, 1)[:, 0])
    for chosen in (uniforms, None):
        one = sampling.draw_token(logits, chosen, temperature, kernel="triton")
        other = sampling.draw_token(logits, chosen, temperature, kernel="reference")
        same = one[0] == other[0]
        assert same.float().mean() > 0.99, "only numbers within rounding of an edge may choose differently"
        torch.testing.assert_close(one[1][same], other[1][same], rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, FP8), (FP8, FP8)])
def test_attention_over_keys_and_values_in_fp8(dtypes):
    generator = torch.Generator("cuda").manual_seed(0)
    lengths = torch.tensor([0, 63, 700, 1700], device="cuda")
    rows = CacheRows(lengths, 64, table_BN=(torch.randperm(4 * 27, device="cuda") + 1).view(4, 27).int())
    turns = torch.ones(4, 128, device="cuda"), torch.zeros(4, 128, device="cuda")
    qkv = torch.randn(4, 36 * 128, generator=generator, device="cuda").bfloat16()
    caches = [torch.randn(109, 64, 4, 128, generator=generator, device="cuda").to(dtype) for dtype in dtypes]
    wide = [cache.double() for cache in caches]
    for cache, part in zip(caches, (slice(28 * 128, 32 * 128), slice(32 * 128, None)), strict=True):
        qkv[:, part] = qkv[:, part].to(cache.dtype).bfloat16()  # so that storing rounds no more
    exact = reference.cached_attention(qkv.double(), turns, 28, 4, *wide, rows, 0.1)
    for plan in (WHOLE, FINE):
        found = triton.cached_attention(qkv, turns, 28, 4, *caches, rows, 0.1, None, plan)
        torch.testing.assert_close(found.double(), exact, rtol=2e-2, atol=2e-2)
    assert all(torch.equal(cache.double(), other) for cache, other in zip(caches, wide, strict=True))


@pytest.mark.parametrize("kv_format", ["fp8_values", "fp8"])
def test_captured_steps_over_fp8_give_the_answers_of_the_reference(qwen2_folder, tokenizer, kv_format):
    model, found = load(qwen2_folder), []
    for graphs in (True, False):
        engine = Engine(model, tokenizer, max_num_seqs=16, graphs=graphs, kv_format=kv_format)
        found.append(tokens_of(engine.generate(make_prompts(RAGGED), SPEC, group_size=GROUP)[0]))
    assert found[0] == found[1]


@pytest.mark.parametrize("scope", [None, "rollout"])
def test_answers_that_read_their_prompt_together_are_those_of_rows_by_themselves(tmp_path, monkeypatch, scope):
    monkeypatch.setattr(rollout_builders, "MAX_POSITIONS", 1024)
    for name, value in (("LEAST_ROWS", 2), ("LEAST_PAGES", 8), ("LEAST_SPARED", 1)):
        monkeypatch.setattr(together_module, name, value)
    folder = rollout_builders.write_checkpoint(tmp_path / "long", "qwen2")
    model, tokenizer = load(folder), load_tokenizer(folder)
    noise, found = None if scope is None else make_noise(model, scope), []
    for together in (False, True):
        engine = Engine(model, tokenizer, max_num_seqs=16, read_together=together)
        found.append(tokens_of(engine.generate(make_prompts((540, 700, 30, 600)), SPEC, group_size=5, noise=noise)[0]))
    assert found[0] == found[1]


def test_answers_that_outgrow_the_steps_of_short_contexts_go_on_as_they_would(tmp_path, monkeypatch):
    """Rows of 100 tokens pass 128 while others, of 20, never do; with one size of context, all steps are those of long ones."""
    monkeypatch.setattr(rollout_builders, "MAX_POSITIONS", 1024)
    monkeypatch.setattr(workspace, "SHORT_TOKENS", 128)
    folder = rollout_builders.write_checkpoint(tmp_path / "long", "qwen2")
    model, tokenizer = load(folder), load_tokenizer(folder)
    prompts, spec, found = make_prompts((100, 20, 90, 64)), SamplingSpec(max_new_tokens=50, seed=4), []
    for many in (8, 10**6):
        monkeypatch.setattr(workspace, "MANY_PAIRS", many)
        engine = Engine(model, tokenizer, max_num_seqs=24)
        found.append(engine.generate(prompts, spec, group_size=6)[0])
        assert engine._workspace is not None and engine._workspace.graphs is not None
        columns = {key[2] for key in engine._workspace.graphs._graphs}
        assert columns == ({2, None} if many == 8 else {None})
    assert tokens_of(found[0]) == tokens_of(found[1])
    for one, other in zip(*found, strict=True):
        assert one.behavior_logprobs == pytest.approx(other.behavior_logprobs, abs=1e-5)


@pytest.mark.parametrize("given", [{"top_k": 50}, {"top_p": 0.95}, {"top_k": 20, "top_p": 0.5, "min_p": 0.05}], ids=str)
def test_truncations_keep_what_the_reference_keeps(given):
    logits = torch.randn(64, 151936, generator=torch.Generator("cuda").manual_seed(0), device="cuda") * 3
    logits[1] = (logits[1] * 2).round()  # ties everywhere
    results = [sampling.truncate(logits, 0.8, **given, kernel=kernel) for kernel in ("triton", "reference")]
    differ = (results[0][0] != results[1][0]).sum(1)
    # Where a sum is within rounding of p, a token more or less may be kept.
    assert differ.max() <= 1
    assert (differ > 0).sum() <= (2 if "top_p" in given else 0)
    torch.testing.assert_close(results[0][1][differ == 0], results[1][1][differ == 0], rtol=0, atol=4e-6)


@pytest.mark.parametrize("scope", [None, "response"])
def test_answers_do_not_depend_on_the_parts_of_a_prompt(qwen2_folder, tokenizer, scope):
    model = load(qwen2_folder)
    noise = None if scope is None else make_noise(model, scope)
    prompts, found = make_prompts((5, 33, 1, 44)), []
    for parts in (8192, 7):
        completions, stats = Engine(model, tokenizer, max_num_seqs=8, prefill_tokens=parts).generate(
            prompts, SPEC, group_size=GROUP, noise=noise
        )
        found.append(tokens_of(completions))
    assert stats["prefill_chunks"] > 0
    assert found[0] == found[1]


@pytest.mark.parametrize("scope", [None, "rollout", "group", "response", "token"])
@pytest.mark.parametrize(
    "spec", [SPEC, SamplingSpec(max_new_tokens=18, top_p=0.9), SamplingSpec(temperature=0.0, max_new_tokens=18)]
)
def test_captured_steps_give_the_answers_of_steps_run_one_by_one(qwen2_folder, tokenizer, scope, spec):
    model = load(qwen2_folder)
    noise = None if scope is None else make_noise(model, scope, prompt="clean" if scope == "group" else "noisy")
    found = []
    for graphs in (True, False):
        engine = Engine(model, tokenizer, max_num_seqs=16, graphs=graphs, window=5)
        for _ in range(2):
            completions, stats = engine.generate(make_prompts(RAGGED), spec, group_size=GROUP, noise=noise)
            found.append((tokens_of(completions), [c.behavior_logprobs for c in completions]))
        assert stats["graph_captures"] == 0, "all captures belong to the first call"
    assert found[0][0] == found[1][0] == found[2][0] == found[3][0]
    for one, other in zip(found[0][1], found[2][1], strict=True):
        assert one == pytest.approx(other, abs=1e-5)


@pytest.mark.parametrize("scope", ["group", "response"])
@pytest.mark.parametrize("prompt", ["noisy", "clean"])
def test_noise_kept_in_tables_is_that_of_draws_at_every_step(qwen2_folder, tokenizer, monkeypatch, scope, prompt):
    """6 rows for 20 answers: rows are filled again and moved between captured steps. Two rollouts on one engine."""
    model, found = load(qwen2_folder), []
    for most in (aqn_noise.TABLE_ROWS, 0):
        monkeypatch.setattr(aqn_noise, "TABLE_ROWS", most)
        engine = Engine(model, tokenizer, max_num_seqs=6, window=3)
        for rollout in (2, 3):
            noise = make_noise(model, scope, rollout=rollout, prompt=prompt)
            completions, stats = engine.generate(make_prompts(RAGGED), SPEC, group_size=GROUP, noise=noise)
            found.append(completions)
        assert isinstance(engine._workspace.noise, row_noise.DecodeNoise if most else row_noise.KeyedDecodeNoise)
        assert stats["refills"] > 0
    for kept, drawn in zip(found[:2], found[2:], strict=True):
        assert tokens_of(kept) == tokens_of(drawn)
        for one, other in zip(kept, drawn, strict=True):
            assert one.behavior_logprobs == pytest.approx(other.behavior_logprobs, abs=1e-5)
    assert tokens_of(found[0]) != tokens_of(found[1])


def test_adapters_noise_temperature_and_seed_change_without_a_new_capture(qwen2_folder, tokenizer):
    model = load(qwen2_folder)
    # One look a call: all calls then run steps of one size.
    engine, prompts = Engine(model, tokenizer, max_num_seqs=32, window=18), make_prompts(RAGGED)
    noises = [make_noise(model, "rollout", rollout=i) for i in range(2)]
    answers, captures = [], []

    def generate(spec, noise):
        completions, stats = engine.generate(prompts, spec, group_size=GROUP, noise=noise)
        plain, _ = Engine(model, tokenizer, max_num_seqs=32, graphs=False).generate(
            prompts, spec, group_size=GROUP, noise=noise
        )
        assert tokens_of(completions) == tokens_of(plain)
        answers.append(tuple(tokens_of(completions)))
        captures.append(stats["graph_captures"])

    generate(SPEC, noises[0])
    generate(SPEC, noises[0])
    generate(SPEC, noises[1])
    shift_adapters_on_device(model, 0.3)
    generate(SPEC, noises[1])
    generate(SamplingSpec(max_new_tokens=18, seed=4, temperature=0.6), noises[1])
    generate(SamplingSpec(max_new_tokens=18, seed=5, rollout=3), noises[1])
    assert answers[0] == answers[1]
    assert len(set(answers)) == 5
    assert captures[0] > 0
    assert sum(captures[1:]) == 0


def test_rows_are_filled_again_without_waiting_for_the_device(qwen2_folder, tokenizer, monkeypatch):
    """The host tells a prefill pass while steps that were told before still run. Float16 attention and copies of weights: the path of a real 0.5B."""
    model = load(qwen2_folder, torch.bfloat16, float32_stream=True, float16_attention=True)
    engine, run = Engine(model, tokenizer, max_num_seqs=6), Prefill.run
    modes = []

    def told(prefill, starts):
        torch.cuda.set_sync_debug_mode(modes[-1])
        try:
            yield from run(prefill, starts)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Prefill, "run", told)
    # What is made once waits: kernels, divisors of weights.
    for mode in ("default", "error"):
        modes.append(mode)
        _, stats = engine.generate(make_prompts(RAGGED), SPEC, group_size=GROUP)
    assert stats["refills"] > 0 and stats["prefill_tokens"] > 0


def shift_adapters_on_device(model, size):
    for name, parameter in model.trainable_parameters().items():
        if "lora_b" in name:
            change = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) * size
            parameter.data.add_(change.to(parameter.device))


@pytest.mark.parametrize("scope", [None, "response"])
def test_with_static_shapes_an_answer_has_the_same_bits_alone_and_in_any_batch(qwen2_folder, tokenizer, scope):
    model = load(qwen2_folder, torch.bfloat16)
    noise = None if scope is None else make_noise(model, scope)
    engine, prompts = Engine(model, tokenizer, max_num_seqs=8, static_shapes=True), make_prompts(RAGGED)
    together, _ = engine.generate(prompts, SPEC, group_size=GROUP, noise=noise)
    for index in (0, 5, 13, 19):
        alone, _ = engine.generate([prompts[index // GROUP]], SPEC, first_sample_key=index, noise=noise)
        assert list(alone) == [together[index]]


@pytest.mark.parametrize(
    ("scope", "types"),
    [
        ("rollout", {}),
        ("response", {}),
        ("response", {"float32_stream": True}),
        ("response", {"float32_stream": True, "float16_attention": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("base", "dense_cache"), [("nvfp4", "on"), ("nvfp4", "off"), ("bf16", "auto"), ("bf16", "off")]
)
def test_engine_and_trainer_agree_in_bfloat16(qwen2_folder, tokenizer, scope, types, base, dense_cache):
    model = load(qwen2_folder, torch.bfloat16, dense_cache, base, **types)
    linears = list(model.grouped_linears())
    assert all((linear.weight.kept_OI is not None) == (dense_cache != "off") for linear in linears)
    if base == "nvfp4":
        assert all(linear.dense_OI is None for linear in linears), "no weight is rounded"
    numbers = sum(linear.weight.shape[0] * linear.weight.shape[1] for linear in linears)
    assert measure_resident(model)["dense_cache"] == (2 * numbers if dense_cache == "on" else 0)
    noise = make_noise(model, scope)
    completions, _ = Engine(model, tokenizer, max_num_seqs=16).generate(
        make_prompts(RAGGED), SPEC, group_size=GROUP, noise=noise
    )
    samples = [Sample(completion=completion, advantage=1.0, in_loss=True) for completion in completions]
    gaps = []
    with torch.no_grad():
        for batch in pack(samples, 10_000, torch.device("cuda")):
            logprobs, _ = policy_logprobs(model, batch, 1.0, noise=noise)
            gaps.append((logprobs.exp() - batch.behavior_logprobs_N.exp()).abs())
    assert torch.cat(gaps).mean() < KERNEL_TOLERANCE

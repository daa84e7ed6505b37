"""How many variants of each Triton kernel a run meets, whatever its batches: a variant that is met for the first time is compiled in the middle of
a step, for a second or so. Numbers of tokens, rows and samples must therefore be nothing that Triton tells variants apart by."""

import triton_cpu  # isort: skip  (before any module with kernels)

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rollout_builders import make_prompts
from specialization import recorded
from tiny_models import load_tiny, write_tiny

from qerl.config.load import load_config
from qerl.formats import get_format
from qerl.kernels.cached_attention import CacheRows
from qerl.kernels.cached_attention import triton as cached_attention
from qerl.kernels.cached_attention.plan import plan_for
from qerl.kernels.fp4_linear import kept
from qerl.kernels.fp4_linear.adapter import Placement
from qerl.kernels.rms_norm import triton as rms_norm
from qerl.kernels.sampling import triton as sampling
from qerl.kernels.token_logprobs import logits
from qerl.kernels.token_logprobs import triton as token_logprobs
from qerl.memory.rows import BUCKETS
from qerl.model.aqn import NoiseState
from qerl.objective.batch import Sample
from qerl.records import Completion, Prompt, SamplingSpec
from qerl.rollout.engine import Engine
from qerl.train.diagnostics.passes import answer_hidden, pack_answers
from qerl.train.learn import learn
from qerl.train.noise.ahead import meet_noise
from qerl.train.noise.measure import draws_for
from qerl.train.optimizer import make_optimizer
from qerl.train.timing import StageTimer

assert triton_cpu
OPERATIONS = ("rms_norm", "token_logprobs", "activation", "rope", "philox")
SETTINGS = [
    "lora.rank=4", "rollout.max_prompt_tokens=40", "rollout.max_new_tokens=80", "train.token_budget=130",
    "objective.denominator=recomputed", "train.share_prompts=true",
]  # fmt: skip
EVERY = {
    "activation.triton._silu": 1,
    "activation.triton._silu_gradient": 1,
    # The first norm's stream has one reader; scales of layers are trained and the last one's are not.
    "rms_norm.triton._backward": 3,
    # The first norm adds nothing, the second the embedding in bfloat16, the others a float32 stream; each with one tile a program, as in decode steps,
    # and with several.
    "rms_norm.triton._forward": 6,
    "rope.triton._backward": 1,
    "rope.triton._forward": 1,
    # With a gradient to come and without.
    "token_logprobs.device.absorb": 2,
    "token_logprobs.device.finish": 2,
}
"""Kernel -> variants of a run without noise."""
# The last norm is not noisy here: two variants of the forward pass more.
NOISY = EVERY | {"rms_norm.triton._forward": 8}
EXPECTED = {
    None: EVERY,
    # Draws for layers and for heads.
    "rollout": NOISY | {"philox.triton._normal_rows": 2},
    "group": NOISY | {"philox.triton._normal_rows": 1},
    "response": NOISY | {"philox.triton._normal_rows": 1},
    "token": NOISY,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, "qwen3-wide-heads", hidden_size=128, vocab_size=512, num_hidden_layers=2)
    return path


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    """Programs with several tiles, several tiles of the head and several blocks of tokens, at small sizes."""
    monkeypatch.setattr(rms_norm, "_PROGRAMS", 5)
    monkeypatch.setattr(token_logprobs, "TILE_ROWS", 256)
    monkeypatch.setattr(token_logprobs, "tile_tokens", lambda *shape: 64)


def answers(rng: random.Random) -> list[list[Sample]]:
    """Groups of a few answers: one token, whole sixteens, and any length."""

    def words(count):
        return tuple(rng.randrange(3, 90) for _ in range(count))

    groups = []
    for group in range(rng.randint(1, 3)):
        prompt = Prompt(id="", question="", answer="", text="", token_ids=words(rng.randint(1, 40)))
        groups.append([])
        for index in range(rng.randint(1, 4)):
            count = rng.choice([1, 16, 64, rng.randint(1, 80)])
            completion = Completion(
                prompt=prompt, sample_key=4 * group + index, token_ids=words(count), text="", stop_reason="stop",
                behavior_logprobs=(-4.5,) * count, sampler_logprobs=(-4.5,) * count,
            )  # fmt: skip
            groups[-1].append(Sample(completion=completion, advantage=rng.choice([0.0, 1.0, -1.0]), in_loss=True))
    return groups


def noise_of(scope, model):
    sites = ("attn_norm", "mlp_norm", "qk_norm")[: 3 if scope == "rollout" else 2]
    state = NoiseState(seed=0, rollout=1, scope=scope, stage=1, sigma=0.1, sites=sites, group_size=4)
    return state.materialize(model)


@pytest.mark.parametrize(("scope", "half"), [*((scope, False) for scope in EXPECTED), (None, True)])
def test_a_training_pass_meets_as_many_variants_as_its_flags_and_no_more_for_its_sizes(folder, scope, half):
    config = load_config(None, SETTINGS)
    model = load_tiny(folder, lora=config.lora, dtype=torch.bfloat16, float32_stream=True, float16_attention=half)
    optimizer = make_optimizer(model.trainable_parameters(), config.optim)
    rng = random.Random(0)
    with recorded(*OPERATIONS) as variants:
        noise = None if scope is None else noise_of(scope, model)
        for step in range(5):
            learn(config, model, optimizer, answers(rng), noise=noise, completed=step, timer=StageTimer())
    assert variants.counts() == EXPECTED[scope], variants.differences()
    assert variants.launches["rms_norm.triton._forward"] > 50


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("scope", ["rollout", "response", "token"])
def test_noise_asks_nothing_of_a_compiler_that_was_not_asked_before_the_first_step(folder, scope, checkpointing):
    noisy = [f"aqn.scope={scope}", "aqn.sites=[attn_norm,mlp_norm]", f"train.checkpointing={checkpointing}"]
    config = load_config(None, [*SETTINGS, "aqn.prompt=noisy", *noisy])
    model = load_tiny(folder, lora=config.lora, dtype=torch.bfloat16, float32_stream=True)
    optimizer = make_optimizer(model.trainable_parameters(), config.optim)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with recorded(*OPERATIONS) as early:
        meet_noise(config, model, sizes=(32, 96))
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    state = NoiseState(
        seed=0, rollout=1, scope=scope, stage=1, sigma=0.1, sites=("attn_norm", "mlp_norm"), group_size=4
    )
    rng = random.Random(0)
    with recorded(*OPERATIONS) as late:
        noise = state.materialize(model)
        for step in range(3):
            learn(config, model, optimizer, answers(rng), noise=noise, completed=step, timer=StageTimer())
        # What a stage begins with; passes without noise are those of training.
        with torch.no_grad():
            measured = draws_for(state).materialize(model)
            for batch in pack_answers([s.completion for group in answers(rng) for s in group], 130, model.device):
                answer_hidden(model, batch, measured)
    for name in ("rms_norm.triton._forward", "rms_norm.triton._backward", "philox.triton._normal_rows"):
        assert late.keys[name] <= early.keys[name], name
    assert len(early.keys["rms_norm.triton._backward"]) >= 3 and (
        early.keys["philox.triton._normal_rows"] or scope == "token"
    )


def test_a_run_without_noise_draws_none_before_its_first_step(folder):
    config = load_config(None, [*SETTINGS, "aqn.enabled=false"])
    model = load_tiny(folder, lora=config.lora, dtype=torch.bfloat16)
    with recorded(*OPERATIONS) as early:
        meet_noise(config, model)
    assert not early.keys


def test_prefill_passes_of_any_size_meet_the_same_variants(folder):
    model = load_tiny(folder, dtype=torch.bfloat16, float32_stream=True)
    tokenizer = SimpleNamespace(eos_ids=(2,), decode=lambda ids: "")
    engine = Engine(model, tokenizer, prefill_tokens=48)
    rng = random.Random(1)
    with recorded("rms_norm", "activation", "rope") as variants:
        for _ in range(4):
            prompts = make_prompts([rng.choice([2, 17, 33, rng.randint(2, 60)]) for _ in range(rng.randint(1, 5))])
            engine.generate(prompts, SamplingSpec(temperature=1.0, max_new_tokens=1, seed=0), group_size=2)
    assert variants.counts() == {
        "activation.triton._silu": 1,
        # One of them for the norms over heads of decode steps, which are in the attention kernel on a GPU.
        "rms_norm.triton._forward": 7,
        "rope.triton._forward": 1,
    }, variants.differences()


def test_the_kernel_of_kept_values_has_one_variant_a_shape(monkeypatch):
    counters = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(kept, "workspace", lambda device: SimpleNamespace(counters=lambda: counters))
    values, bias = torch.zeros(512, 512).bfloat16(), torch.zeros(512).bfloat16()
    a, b = torch.zeros(32, 512).bfloat16(), torch.zeros(256, 32).bfloat16()
    places = [Placement(rows=slice(0, 256), a_index=0, ranks=slice(0, 32), scale=2.0)]
    pieces = (kept.Piece(256, 1.0, 0), kept.Piece(512, 1.0, kept.NO_ADAPTER))
    with recorded() as variants:
        for shape in kept.SHAPES:
            for tokens in (17, 31, 32, 48, 63, 64, 100):
                for splits in (1, 2, 3):
                    x = torch.zeros(tokens, 512).bfloat16()
                    kept.run(x, values, bias, pieces, places, [a], [b], replace(shape, splits=splits))
    assert variants.counts() == {"fp4_linear.kept._product": 2 * len(kept.SHAPES)}, variants.differences()


def test_the_fp8_head_has_one_variant_for_each_tile_of_tokens():
    head = get_format("fp8").quantize(torch.randn(256, 64))
    with recorded() as variants:
        for tokens in range(1, 257):
            logits.fp8_logits(torch.zeros(tokens, 64).bfloat16(), head)
    assert variants.counts() == {"token_logprobs.logits._fp8_logits": 4}, variants.differences()


def test_decode_steps_of_all_sizes_meet_few_variants(monkeypatch):
    """Of a 0.5B on an H200, with short contexts and long ones."""
    heads, kv_heads, size = 14, 2, 64
    monkeypatch.setattr(cached_attention, "_processors", lambda device: 132)
    words, table = torch.zeros(512, dtype=torch.int64), torch.zeros(512, 40, dtype=torch.int32)
    books = dict.fromkeys(("last_token_R", "length_R", "count_R", "limit_R", "alive_R"), words)
    books |= {"tokens_WR": torch.zeros(8, 512, dtype=torch.int32), "logprobs_2WR": torch.zeros(2, 8, 512)}
    cache = torch.zeros(4, 64, kv_heads, size).bfloat16()
    with recorded() as variants:
        for rows in [bucket for bucket in BUCKETS if bucket <= 256]:
            some, turns = words[:rows], torch.zeros(rows, size)
            qkv = torch.zeros(rows, (heads + 2 * kv_heads) * size).bfloat16()
            for tiles in (16, 64):
                plan = plan_for(rows, kv_heads, 132, tiles)
                where = CacheRows(some, 64, table_BN=table[:rows])
                cached_attention.cached_attention(
                    qkv, (turns, turns), heads, kv_heads, cache, cache, where, 0.1, None, plan
                )
            uniforms, temperature = sampling.keyed_uniforms(words[:3], some, some), torch.ones(1, dtype=torch.float64)
            tokens, logprobs = sampling.draw_token(torch.zeros(rows, 1000), uniforms, temperature)
            sampling.advance_rows(tokens, logprobs, logprobs, **books, cursor_1=words[:1], eos_E=words[:2])
    assert variants.counts() == {
        # Parts of contexts in 64 lanes, in 512, or none are cut; copies that go ahead for many programs or for few.
        "cached_attention.contexts.attend": 5,
        "sampling.triton._advance": 2,
        "sampling.triton._block_stats": 1,
        "sampling.triton._pick": 1,
        "sampling.triton._uniforms": 1,
    }, variants.differences()

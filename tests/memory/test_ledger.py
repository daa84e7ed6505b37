"""The prediction against figures known beforehand, and against itself."""

import pytest
from memory_builders import GRPO_STEP, configured, qwen
from tiny_models import load_tiny, write_tiny

from qerl.memory import PHASES, predict, trained_tensors
from qerl.memory.ledger import group_tokens, kv_bytes, micro_batch_tokens
from qerl.records import Prompt, SamplingSpec
from qerl.rollout.engine import Engine
from qerl.units import GB


@pytest.mark.parametrize(("size", "paper", "bound"), [("7b", 12.8, 14), ("14b", 20.6, 24), ("32b", 36.0, 48)])
def test_a_grpo_step_needs_what_was_worked_out_on_paper(size, paper, bound):
    """The figures on paper keep a reserve of about a gigabyte."""
    ledger = predict(configured(*GRPO_STEP), qwen(size), device_type="cuda")
    assert ledger.peak_phase == "backward"
    assert 0.87 * paper <= ledger.peak / GB <= paper
    assert ledger.peak / GB < bound


@pytest.mark.parametrize(
    ("size", "linears", "vocabulary", "kv_token", "adapters"),
    [("7b", 6.525e9, 2.180e9, 57_344, 80.7e6), ("32b", 31.21e9, 3.114e9, 262_144, 268.4e6)],
)
def test_owners_are_what_hand_arithmetic_gives(size, linears, vocabulary, kv_token, adapters):
    config = configured(*GRPO_STEP)
    ledger = predict(config, qwen(size), device_type="cuda")
    assert ledger.resident["base_weights"] == pytest.approx(9 / 16 * linears, rel=2e-3)
    assert ledger.resident["embeddings"] == pytest.approx(vocabulary, rel=1e-3)
    assert ledger.resident["adapters"] == pytest.approx(4 * adapters, rel=1e-3)
    assert ledger.resident["adapter_copies"] == pytest.approx(2 * adapters, rel=1e-3)
    assert ledger.resident["optimizer"] == pytest.approx(8 * adapters, rel=5e-3)
    # 34 pages of 64 tokens each, the spare row's prompt, and three more.
    assert ledger.phases["rollout"]["kv_cache"] == (8 * 34 + 2 + 3) * 64 * kv_token


def test_rank_32_on_a_square_matrix_of_4096_is_262144_parameters():
    spec = qwen("7b")
    one = trained_tensors(spec, configured("lora.rank=1", "lora.targets=[o_proj]", "lora.train_norms=false"))
    assert sum(one["adapters"]) == spec.num_layers * 2 * 3584
    assert one["norms"] == []


def test_full_mode_costs_eighteen_bytes_a_weight_or_twelve():
    spec = qwen("7b")
    weights = 7.616e9
    for name, expected in (("adamw", 18), ("adamw_8bit", 12)):
        config = configured("train.mode=full", "quant.format=bf16", f"optim.name={name}", "train.token_budget=2048")
        ledger = predict(config, spec, device_type="cuda")
        left_out = ("tables", "workspace", "kv_cache")
        total = sum(size for owner, size in ledger.resident.items() if owner not in left_out)
        total += ledger.phases["backward"]["gradients"]
        assert total / weights == pytest.approx(expected, rel=0.01)


def test_phases_share_what_is_resident_and_nothing_else():
    ledger = predict(configured(*GRPO_STEP, "aqn.scope=response"), qwen("7b"), device_type="cuda")
    resident = sum(ledger.resident.values())
    assert list(ledger.phases) == list(PHASES)
    assert ledger.total("load") == (
        resident - ledger.resident["optimizer"] - ledger.resident["masters"] + ledger.phases["load"]["working"]
    )
    for phase in PHASES[1:]:
        assert ledger.total(phase) == resident + sum(ledger.phases[phase].values())
    assert ledger.peak == max(ledger.total(phase) for phase in PHASES)
    assert ledger.phases["rollout"]["noise"] == 4 * 8 * 28 * 2 * 3584
    # Tables of up to 64 rows stay when the rollout is over; of more there are none.
    assert ledger.phases["optimizer"]["noise"] == ledger.phases["rollout"]["noise"]
    many = predict(
        configured(*GRPO_STEP, "aqn.scope=response", "rollout.max_num_seqs=65"), qwen("7b"), device_type="cuda"
    )
    assert "noise" not in many.phases["optimizer"]
    assert ledger.phases["backward"]["noise"] - many.phases["backward"]["noise"] == ledger.phases["rollout"]["noise"]
    assert "gradients" not in ledger.phases["rollout"] and "kv_cache" not in ledger.phases["backward"]
    assert ledger.owners()["working"] == max(brought.get("working", 0) for brought in ledger.phases.values())


def test_a_pass_for_log_probs_exists_only_where_it_is_run():
    spec = qwen("7b")
    plain = predict(configured(*GRPO_STEP), spec, device_type="cuda")
    for setting in ("objective.denominator=recomputed", "objective.kl_coef=0.1"):
        other = predict(configured(*GRPO_STEP, setting), spec, device_type="cuda")
        assert other.total("logprobs") > plain.total("logprobs")
    assert plain.phases["logprobs"]["working"] == 0


def test_keys_and_values_that_are_kept_are_there_in_every_phase_but_loading():
    spec = qwen("7b")
    settings = [setting for setting in GRPO_STEP if "keep_cache" not in setting]
    returned, kept = (
        predict(configured(*GRPO_STEP), spec, device_type="cuda"),
        predict(configured(*settings), spec, device_type="cuda"),
    )
    size = returned.phases["rollout"]["kv_cache"]
    assert kept.resident["kv_cache"] == size
    assert kept.total("backward") == returned.total("backward") + size
    assert kept.total("rollout") == returned.total("rollout") and kept.total("load") == returned.total("load")
    capped = predict(configured(*settings, "rollout.kv_cache_gb=0.5"), spec, device_type="cuda")
    assert capped.resident["kv_cache"] == 500_000_000
    roomy = predict(configured(*settings, "rollout.kv_cache_gb=50"), spec, device_type="cuda")
    assert roomy.resident["kv_cache"] == size


@pytest.mark.parametrize(
    ("smaller", "phase"),
    [
        (("train.checkpointing=selective",), "backward"),
        (("train.checkpointing=full",), "backward"),
        (("train.token_budget=4352",), "backward"),
        (("optim.name=adamw_8bit",), "optimizer"),
        (("lora.rank=8",), "optimizer"),
        (("quant.lm_head=fp8",), "rollout"),
        (("rollout.max_num_seqs=4",), "rollout"),
        (("rollout.max_new_tokens=1024",), "rollout"),
    ],
)
def test_every_setting_that_saves_memory_saves_it(smaller, phase):
    base = [setting for setting in GRPO_STEP if "checkpointing" not in setting]
    spec = qwen("7b")
    large = predict(configured(*base, "train.checkpointing=none"), spec, device_type="cuda")
    small = predict(configured(*base, "train.checkpointing=none", *smaller), spec, device_type="cuda")
    assert small.total(phase) < large.total(phase)


def test_offloaded_layer_inputs_are_one_instead_of_one_a_layer():
    spec = qwen("7b")
    kept = predict(configured(*GRPO_STEP), spec, device_type="cuda")
    moved = predict(configured(*GRPO_STEP, "train.activation_offloading=true"), spec, device_type="cuda")
    stream = 8192 * 3584 * 2
    assert kept.phases["backward"]["activations"] - moved.phases["backward"]["activations"] == 27 * stream
    on_cpu = (*GRPO_STEP, "train.share_prompts=false", "train.activation_offloading=true")
    here = predict(configured(*on_cpu), spec, device_type="cpu").phases["backward"]["activations"]
    assert here == 28 * stream, "what waits in the memory where it was is there all the same"


def test_a_micro_batch_is_no_larger_than_what_there_is_to_learn_from():
    assert micro_batch_tokens(configured(*GRPO_STEP), "cuda") == 8192
    few = (
        "rollout.prompts_per_step=2",
        "rollout.group_size=2",
        "rollout.max_prompt_tokens=10",
        "rollout.max_new_tokens=90",
    )
    assert micro_batch_tokens(configured(*few), "cpu") == 400
    assert micro_batch_tokens(configured(*few, "optim.updates_per_rollout=2"), "cpu") == 200
    # A prompt stands once for its two answers, unless noise tells them apart there.
    assert micro_batch_tokens(configured(*few), "cuda") == 380
    assert micro_batch_tokens(configured(*few, "aqn.scope=group"), "cuda") == 380
    assert micro_batch_tokens(configured(*few, "aqn.scope=response"), "cuda") == 400
    assert micro_batch_tokens(configured(*few, "aqn.scope=response", "aqn.prompt=clean"), "cuda") == 380
    assert micro_batch_tokens(configured(*few, "aqn.scope=response", "aqn.enabled=false"), "cuda") == 380
    assert group_tokens(configured(*few), "cuda") == (190, 210)


def test_gradients_of_a_single_pass_come_as_activations_go():
    """Two micro-batches hold all gradients beside the activations of the second; one does not."""
    spec = qwen("7b")
    once = predict(configured(*GRPO_STEP, "train.token_budget=20000"), spec, device_type="cuda").phases["backward"]
    twice = predict(configured(*GRPO_STEP, "train.token_budget=16000"), spec, device_type="cuda").phases["backward"]
    assert twice["gradients"] == 28 * once["gradients"]
    assert once["activations"] / twice["activations"] == pytest.approx((128 + 8 * 2048) / 16000, rel=1e-3)
    # Few tokens: all gradients at the end of the pass weigh more than all activations at its beginning.
    short = ("rollout.max_new_tokens=16", "rollout.max_prompt_tokens=16", "train.checkpointing=full")
    end = predict(configured(*GRPO_STEP, *short), spec, device_type="cuda").phases["backward"]
    assert end["gradients"] == twice["gradients"]
    assert end["activations"] == pytest.approx(144 * 2 * 3584, rel=1e-3)


@pytest.mark.parametrize("settings", [(), ("rollout.max_prompt_tokens=100", "rollout.max_new_tokens=61")])
def test_the_engine_makes_the_pages_that_are_predicted(tmp_path, settings):
    """A paged cache, which a GPU has, on the CPU."""
    write_tiny(tmp_path, "llama-plain", max_position_embeddings=256)
    model = load_tiny(tmp_path)
    config = configured(
        "model.dtype=float32", "quant.format=bf16", "rollout.prompts_per_step=3", "rollout.group_size=2",
        "rollout.max_prompt_tokens=20", "rollout.max_new_tokens=50", *settings,
    )  # fmt: skip
    predicted = kv_bytes(config, model.spec, "cuda")
    engine = Engine(model, StandInTokenizer(), max_num_seqs=config.decode_slots, paged=True, kv_bytes=predicted)
    prompt = Prompt(id="0", question="", answer="", text="", token_ids=(5,) * config.rollout.max_prompt_tokens)
    sampling = SamplingSpec(temperature=1.0, max_new_tokens=config.rollout.max_new_tokens, seed=0, rollout=0)
    _, stats = engine.generate([prompt] * 3, sampling, group_size=2)
    assert stats["kv_bytes"] == predicted


class StandInTokenizer:
    """Ends no answer and gives no text."""

    eos_ids = (-1,)

    def decode(self, ids):
        return ""

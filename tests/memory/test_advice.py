"""What a plan decides, limits and what each setting buys."""

import json
import re
from pathlib import Path

import pytest
import torch
from memory_builders import GRPO_STEP, budget, configured, qwen, qwen_config
from typer.testing import CliRunner

from qerl import memory
from qerl.cli import app
from qerl.config.load import load_config
from qerl.errors import ConfigError, MemoryBudgetError
from qerl.memory.advice import changed, largest_that
from qerl.memory.ledger import wanted_kv_bytes
from qerl.train import fit, session
from qerl.train.fit import plan, settle_memory
from qerl.units import GB


def test_auto_takes_the_first_way_of_checkpointing_that_fits():
    settings = [s for s in GRPO_STEP if "checkpointing" not in s]
    spec, peaks = qwen("7b"), {}
    for way in ("none", "selective", "full"):
        config = configured(*settings, f"train.checkpointing={way}")
        peaks[way] = memory.predict(config, spec, device_type="cuda").peak / GB
    assert peaks["none"] > peaks["selective"] > peaks["full"]
    auto = configured(*settings)

    def chosen(gigabytes):
        bound = None if gigabytes is None else budget(gigabytes)
        return memory.resolve(auto, spec, bound, device_type="cuda").train.checkpointing

    assert chosen(None) == "none"
    assert chosen(peaks["none"] + 0.01) == "none"
    assert chosen(peaks["none"] - 0.01) == "selective"
    assert chosen(peaks["selective"] - 0.01) == "full"
    assert chosen(1.0) == "full"
    fixed = configured(*settings, "train.checkpointing=none", "rollout.kv_cache_gb=1", "quant.dense_cache=off")
    assert memory.resolve(fixed, spec, budget(1.0), device_type="cuda") == fixed


def test_keys_and_values_are_kept_then_given_back_then_cut_as_the_budget_shrinks():
    settings = [s for s in GRPO_STEP if "keep_cache" not in s]
    spec, config = qwen("14b"), configured(*settings, "rollout.prompts_per_step=4")
    wanted = wanted_kv_bytes(config, spec, "cuda") / GB
    returned = memory.predict(changed(config, "rollout.keep_cache", "off"), spec, device_type="cuda")

    def resolved(gigabytes):
        bound = budget(gigabytes)
        chosen = memory.resolve(config, spec, bound, device_type="cuda")
        ledger = memory.predict(chosen, spec, device_type="cuda")
        return chosen.rollout, ledger, ledger.peak <= bound.size

    roomy, _, fits = resolved(80)
    assert (roomy.keep_cache, roomy.kv_cache_gb, fits) == ("on", "auto", True)
    all_kept = memory.predict(changed(config, "rollout.keep_cache", "on"), spec, device_type="cuda").peak / GB
    cut, ledger, fits = resolved(all_kept - 0.5)
    assert fits and cut.keep_cache == "on" and cut.kv_cache_gb == pytest.approx(wanted - 0.5, abs=1e-3)
    assert ledger.peak == pytest.approx((all_kept - 0.5) * GB, abs=2e3), "the budget is used"
    tight, ledger, fits = resolved(returned.total("backward") / GB + 0.1)
    assert fits and tight.keep_cache == "off" and tight.kv_cache_gb < wanted
    assert ledger.total("rollout") <= (returned.total("backward") / GB + 0.1) * GB
    *_, fits = resolved(returned.total("backward") / GB - 0.5)
    assert not fits
    assert memory.resolve(config, spec, None, device_type="cuda").rollout.keep_cache == "on"


@pytest.mark.parametrize(("size", "gigabytes"), [("0.5b", 24), ("0.5b", 132), ("7b", 24), ("7b", 80), ("32b", 44)])
def test_the_token_budget_grows_with_the_memory_and_leaves_room(size, gigabytes):
    spec, bound = qwen(size), budget(gigabytes)
    auto = configured(
        "rollout.max_prompt_tokens=512",
        "rollout.max_new_tokens=1024",
        "train.token_budget=auto",
        "rollout.max_num_seqs=8",
    )
    chosen = memory.resolve(auto, spec, bound, device_type="cuda")
    tokens = chosen.train.token_budget
    ledger = memory.predict(chosen, spec, device_type="cuda")
    assert ledger.peak <= bound.size
    assert 1536 <= tokens <= 65536 and tokens * 2 * spec.intermediate_size <= 1 << 30

    def needed(count):
        """By the passes, with as few keys and values as there can be: these take what is left."""
        alone = changed(changed(chosen, "rollout.keep_cache", "off"), "rollout.kv_cache_gb", 0.2)
        return memory.predict(changed(alone, "train.token_budget", count), spec, device_type="cuda").peak

    if tokens > 16384:
        assert needed(tokens) <= 0.7 * bound.size
    at_most = min(65536, (1 << 30) // (2 * spec.intermediate_size))
    assert tokens == at_most or needed(tokens + 64) > 0.69 * bound.size


def test_keys_and_values_take_what_passes_leave_and_not_the_other_way_round():
    """256 sequences at their longest want as much as a 24 GB card has; they get less, and passes stay as large as for 8."""
    few, many = (
        memory.resolve(
            configured("train.token_budget=auto", "rollout.max_new_tokens=1024", f"rollout.max_num_seqs={sequences}"),
            qwen("7b"),
            budget(22),
            device_type="cuda",
        )
        for sequences in (8, 256)
    )
    assert few.train.token_budget >= many.train.token_budget >= 16384
    assert memory.predict(many, qwen("7b"), device_type="cuda").peak <= budget(22).size
    assert 0 < many.rollout.kv_cache_gb < 22


def test_without_a_budget_passes_have_their_default_size():
    auto = configured("train.token_budget=auto")
    assert memory.resolve(auto, qwen("7b"), None, device_type="cpu").train.token_budget == auto.pass_tokens == 16384
    long = configured("train.token_budget=auto", "rollout.max_new_tokens=20000")
    assert memory.resolve(long, qwen("7b"), None, device_type="cpu").train.token_budget == 20512


def test_what_the_user_fixed_stays():
    spec, bound = qwen("14b"), budget(22)
    fixed = configured(*GRPO_STEP, "rollout.keep_cache=on", "rollout.kv_cache_gb=1.5")
    rollout = memory.resolve(fixed, spec, bound, device_type="cuda").rollout
    assert (rollout.keep_cache, rollout.kv_cache_gb) == ("on", 1.5)


@pytest.mark.parametrize("gigabytes", [16, 24, 44])
def test_limits_are_the_largest_that_fit_and_one_more_does_not(gigabytes):
    spec, config, bound = qwen("7b"), configured(*GRPO_STEP, "rollout.prompts_per_step=16"), budget(gigabytes)

    def peak(setting, value):
        tried = changed(config, setting, value)
        if setting != "rollout.max_num_seqs":
            one = wanted_kv_bytes(tried, spec, "cuda", sequences=1) / GB + 1e-6
            tried = changed(tried, "rollout.kv_cache_gb", one)
        return memory.predict(tried, spec, device_type="cuda").peak

    for limit in memory.limits(config, spec, bound, device_type="cuda"):
        if limit.largest is None:
            continue
        assert peak(limit.setting, limit.largest) <= bound.size
        tops = {"rollout.max_num_seqs": 128, "train.token_budget": 1 << 20, "rollout.max_new_tokens": 8192 - 128}
        if limit.largest < tops[limit.setting]:
            assert peak(limit.setting, limit.largest + 1) > bound.size


def test_nothing_fits_a_budget_below_the_weights():
    limits = memory.limits(configured(*GRPO_STEP), qwen("32b"), budget(10), device_type="cuda")
    assert [limit.largest for limit in limits] == [None, None, None]


def test_largest_that_by_hand():
    assert largest_that(lambda value: value <= 37, 1, 100) == 37
    assert largest_that(lambda value: True, 1, 100) == 100
    assert largest_that(lambda value: False, 1, 100) is None
    assert largest_that(lambda value: True, 5, 4) is None


def test_options_are_true_and_sorted():
    spec, config = qwen("7b"), configured(*GRPO_STEP)
    found = memory.options(config, spec, None, device_type="cuda")
    assert {option.change.split("=")[0] for option in found} >= {
        "train.activation_offloading", "train.token_budget", "optim.name", "lora.rank", "quant.lm_head",
    }  # fmt: skip
    assert [option.peak for option in found] == sorted(option.peak for option in found)
    now = memory.predict(config, spec, device_type="cuda").peak
    for option in found:
        tried = with_text(GRPO_STEP, option.change)
        assert memory.predict(tried, spec, device_type="cuda").peak == option.peak < now


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(qwen_config("32b")))
    return tmp_path


def test_a_plan_needs_a_config_json_and_nothing_else(model):
    config = configured(*GRPO_STEP, f"model.path={model}")
    text, fits = plan(config, gpu="48GB")
    assert fits and "fits" in text and "peak: backward" in text
    text, fits = plan(config, gpu="24GB")
    assert not fits and "DOES NOT FIT" in text and "none" in text


def test_the_command_exits_with_one_where_the_plan_does_not_fit(model, monkeypatch):
    def run(*arguments):
        return CliRunner().invoke(app, ["plan", *GRPO_STEP, f"model.path={model}", *arguments])

    assert run("--gpu", "48GB").exit_code == 0
    refused = run("--gpu", "24GB")
    assert refused.exit_code == 1 and "DOES NOT FIT" in refused.output
    smaller = run("--gpu", "48GB", "train.memory_budget=24")
    assert smaller.exit_code == 1 and "(92% of train.memory_budget=24): DOES NOT FIT" in smaller.output
    assert run("--gpu", "small").exit_code == 2
    monkeypatch.setattr("qerl.train.fit.machine_memory", lambda: int(512 * GB))
    unbounded = run()
    assert unbounded.exit_code == 0 and "budget: none, as this is a plan for the CPU" in unbounded.output
    assert "plan for the CPU" not in run("--gpu", "48GB").output


def test_a_plan_for_the_cpu_fits_the_machine_or_says_that_it_does_not(model, monkeypatch):
    def run(*arguments):
        return CliRunner().invoke(app, ["plan", *GRPO_STEP, f"model.path={model}", "model.device=cpu", *arguments])

    monkeypatch.setattr("qerl.train.fit.machine_memory", lambda: int(25.2 * GB))
    small = run()
    assert small.exit_code == 1 and "this machine has 25.2 GB: DOES NOT FIT" in small.output
    assert run("train.memory_budget=off").exit_code == run("--gpu", "48GB").exit_code == 0
    monkeypatch.setattr("qerl.train.fit.machine_memory", lambda: int(512 * GB))
    assert run().exit_code == 0 and "and this machine has 512 GB" in run().output
    monkeypatch.setattr("qerl.train.fit.machine_memory", lambda: None)
    assert run().exit_code == 0


def test_training_refuses_the_plan_with_the_same_text(model):
    config = configured(
        *GRPO_STEP, f"model.path={model}", "train.memory_budget=20", "data.train=arithmetic", "model.device=cpu"
    )
    with pytest.raises(MemoryBudgetError) as caught:
        settle_memory(config)
    text, fits = plan(config)
    assert not fits and text in str(caught.value)
    assert "train.memory_budget=20" in str(caught.value)
    run = CliRunner().invoke(app, ["train", *GRPO_STEP, f"model.path={model}", "train.memory_budget=20", "data.train=arithmetic", "model.device=cpu"])  # fmt: skip
    assert run.exit_code == 2
    assert settle_memory(configured(*GRPO_STEP, f"model.path={model}", "train.memory_budget=off", "model.device=cpu"))


def with_text(settings, text):
    """The settings with advised ones added, as on a command line."""
    return configured(*settings, *text.split())


def fits(config, spec, bound):
    settled = memory.resolve(config, spec, bound, device_type="cuda")
    return memory.predict(settled, spec, device_type="cuda").peak <= bound.size


UNTOLD = tuple(
    setting for setting in GRPO_STEP if not setting.startswith(("train.checkpointing", "rollout.keep_cache"))
)
"""Leaves to the plan how much is computed again and whether keys and values are kept."""


@pytest.mark.parametrize(
    ("settings", "gigabytes"),
    [(GRPO_STEP, 9.4), (UNTOLD, 9.4), (UNTOLD, 8.8), ((*UNTOLD, "train.token_budget=auto"), 8.3)],
)
def test_settings_that_fit_together_do_and_none_of_them_is_needless(settings, gigabytes):
    spec, bound = qwen("7b"), budget(gigabytes)
    settings = (*settings, "rollout.prompts_per_step=8")
    asked = configured(*settings)
    assert not fits(asked, spec, bound)
    found = memory.together(asked, spec, bound, device_type="cuda")
    assert found and "max_new_tokens" not in found
    assert fits(with_text(settings, found), spec, bound)
    changes = found.split()
    for left_out in changes:
        rest = " ".join(change for change in changes if change != left_out)
        try:
            without = with_text(settings, rest)
        except ConfigError:
            continue
        assert not fits(without, spec, bound), left_out
    assert memory.together(asked, spec, budget(3), device_type="cuda") is None


def test_half_a_pass_is_advised_before_activations_in_host_memory():
    """Where either is enough."""
    settings = (
        "train.token_budget=65536",
        "train.checkpointing=full",
        "rollout.kv_cache_gb=1",
        "rollout.max_num_seqs=8",
    )
    asked, spec, bound = configured(*settings), qwen("7b"), budget(24)
    ways = {"train.token_budget": 32768}, {"train.activation_offloading": True}
    assert not fits(asked, spec, bound) and all(fits(memory.advice.altered(asked, way), spec, bound) for way in ways)
    assert memory.together(asked, spec, bound, device_type="cuda") == "train.token_budget=32768"


CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.mark.parametrize(
    ("name", "size", "card", "enough"),
    [
        ("bigmath_14b_nvfp4_aqn", "14b", 16, False),
        ("bigmath_14b_nvfp4_aqn", "14b", 24, False),
        ("bigmath_7b_bf16", "7b", 16, False),
        ("bigmath_7b_full", "7b", 120, True),
        ("bigmath_32b_nvfp4", "32b", 32, False),
        ("bigmath_32b_nvfp4", "32b", 48, True),
    ],
)
def test_what_is_advised_can_be_added_to_what_was_asked_and_fits(tmp_path, name, size, card, enough):
    """By the command, on the user's file: the whole advice, and each row of the table by itself."""
    (tmp_path / "config.json").write_text(json.dumps(qwen_config(size)))
    path = CONFIGS / f"{name}.yaml"

    def run(*more):
        return CliRunner().invoke(app, ["plan", str(path), f"model.path={tmp_path}", "--gpu", f"{card}GB", *more])

    first = run()
    assert first.exit_code == (0 if enough else 1), first.output
    said = re.search(r"what would fit: (.*?)\n +Largest", first.output, flags=re.DOTALL)
    assert (said is None) == enough
    if said is not None:
        again = run(*said[1].split())
        assert again.exit_code == 0, (said[1], again.output)
    spec, bound = qwen(size), memory.budget_of_size(configured(), f"{card}GB")
    asked = load_config(path, [])
    settled = memory.resolve(asked, spec, bound, device_type="cuda")
    rows = memory.options(settled, spec, bound, device_type="cuda", asked=asked)
    if not enough:
        assert any(row.change.endswith("train.activation_offloading=true") for row in rows)
    for row in rows:
        assert all(change in first.output for change in row.change.split()), "whole, to be copied"
        assert fits(load_config(path, row.change.split()), spec, bound) or row.peak > bound.size, row.change


def test_the_most_that_fits_says_what_a_larger_value_runs_into():
    spec, bound = qwen("7b"), budget(44)

    def held(*settings):
        found = memory.limits(configured(*GRPO_STEP, *settings), spec, bound, device_type="cuda")
        return {limit.setting: (limit.largest, limit.held_by) for limit in found}

    found = held()
    assert found["rollout.max_num_seqs"] == (8, "answers of a step")
    assert found["rollout.max_new_tokens"] == (8192 - 128, "train.token_budget")
    assert held("train.token_budget=32768")["rollout.max_new_tokens"] == (32768 - 128, "positions of the model")
    assert held("rollout.prompts_per_step=64")["rollout.max_num_seqs"][1] == "memory"


@pytest.mark.parametrize(("gigabytes", "said"), [(22, True), (80, False)])
def test_a_plan_without_room_to_spare_says_who_took_it(tmp_path, gigabytes, said):
    (tmp_path / "config.json").write_text(json.dumps(qwen_config("7b")))
    settings = (*UNTOLD, "rollout.prompts_per_step=16", f"model.path={tmp_path}")
    text, fitting = plan(configured(*settings), gpu=f"{gigabytes}GB", width=200)
    rest = re.search(r"fits; keys and values take the rest \((.*)\)", text)
    assert fitting and bool(rest) == said and bool(re.search(r"fits, .* to spare", text)) != said
    assert rest is None or f"keys and values: {rest[1]} of" in text


LEAST_KV = 36 * 64 * 57344
"""Bytes of the longest of GRPO_STEP on a 7B: 128 + 2048 - 1 tokens are 34 pages of 64, and two more; a token has 2 x 28 x 512 bfloat16."""


@pytest.mark.parametrize("way", ["plan", "train", "eval"])
def test_keys_and_values_without_room_for_one_sequence_are_refused_before_weights_are_read(tmp_path, monkeypatch, way):
    (tmp_path / "config.json").write_text(json.dumps(qwen_config("7b")))
    for module in (fit, session):
        monkeypatch.setattr(module, "resolve_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr("qerl.memory.budget.share_of", lambda device: int(80 * GB))

    def configure(size):
        settings = (f"rollout.kv_cache_gb={size:.9f}", "train.memory_budget=24", f"model.path={tmp_path}")
        return configured(*GRPO_STEP, *settings)

    entry = {"plan": lambda config: plan(config, gpu="24GB"), "train": settle_memory, "eval": session.open_session}[way]
    for size in (0.001, (LEAST_KV - 1000) / GB):
        with pytest.raises(ConfigError, match="do not fit the memory for them") as caught:
            entry(configure(size))
        room = max(0, int(size * GB) // (64 * 57344) - 2) * 64
        assert f"room for {room} tokens; expected 2175" in str(caught.value)
        assert "Set rollout.kv_cache_gb to at least 0.132121" in str(caught.value)
    if way == "plan":
        assert "room for 1 of 8 sequences" in plan(configure(0.132121), gpu="24GB")[0]

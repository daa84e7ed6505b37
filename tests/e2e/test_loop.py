"""The loop on the packaged model: few steps, every promise about reproducibility and the denominator."""

import json
import math
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from qerl.config.load import load_config
from qerl.data.synthetic import arithmetic_problems
from qerl.metrics.catalogue import is_reproducible
from qerl.metrics.machine_catalogue import STAGES
from qerl.metrics.run_dir import RunDir
from qerl.model.aqn import NoiseState
from qerl.rollout.engine import Engine
from qerl.train.run import train

pytestmark = pytest.mark.usefixtures("blank_reports")

BASE = [
    "model.path=demo",
    "model.dtype=float32",
    "data.eval_limit=16",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.max_prompt_tokens=96",
    "rollout.max_new_tokens=48",
    "lora.rank=4",
    "optim.lr=1e-3",
    "train.steps=4",
    "train.save_every=0",
    "eval.every=0",
    "aqn.num_stages=2",
    "log.progress=off",
]


DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo.yaml"
LEARNS = [
    "rollout.prompts_per_step=8",
    "train.steps=24",
    "data.eval_limit=64",
    "optim.lr=4e-3",
    "eval.every=0",
    "train.save_every=0",
]


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A small arithmetic data set as files: rendering the whole built-in one would take most of a short run."""
    folder = tmp_path_factory.mktemp("data")
    for split in ("train", "test"):
        rows = [asdict(problem) for problem in arithmetic_problems(split, 64)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def starter(folder, data):
    """Runs the training loop under a name, with settings on top of BASE; gives the run folder."""

    def start(name, *settings, resume=False, stop_after=None):
        where = [f"data.train={data}", f"data.eval={data}", f"run.dir={folder}", f"run.name={name}"]
        config = load_config(None, [*BASE, *where, *settings])
        return RunDir.open(train(config, resume=resume, stop_after=stop_after))

    return start


@pytest.fixture
def run(tmp_path, data):
    return starter(tmp_path, data)


@pytest.fixture(scope="module")
def base_run(tmp_path_factory, data):
    """A run of BASE as it is, which several tests look at."""
    return starter(tmp_path_factory.mktemp("plain"), data)("plain")


@pytest.fixture(scope="module")
def base_step(tmp_path_factory, data):
    """One step of BASE as it is."""
    return starter(tmp_path_factory.mktemp("step"), data)("step", "train.steps=1")


def reproducible(run_dir):
    return [{key: value for key, value in row.items() if is_reproducible(key)} for row in run_dir.read_metrics()]


def test_same_seed_gives_the_same_metrics_to_the_bit_and_another_seed_does_not(run, base_run):
    first = reproducible(base_run)
    assert [row["step"] for row in first] == [0, 1, 2, 3, 4]
    assert first == reproducible(run("b"))
    assert first != reproducible(run("c", "train.seed=1"))


@pytest.mark.parametrize("settings", [(), ("optim.updates_per_rollout=2", "objective.noise=absent")])
def test_stopping_and_resuming_changes_no_metric(run, base_run, settings):
    whole = run("whole", *settings) if settings else base_run
    run("parts", *settings, stop_after=2)
    parts = run("parts", *settings, resume=True)
    assert reproducible(whole) == reproducible(parts)
    assert whole.read_json("summary.json")["evaluation"] == parts.read_json("summary.json")["evaluation"]
    assert whole.read_json("summary.json")["tokens"] == parts.read_json("summary.json")["tokens"]


def test_a_killed_run_resumes_from_its_last_checkpoint(run, monkeypatch):
    whole = run("whole", "train.save_every=1")
    from qerl.train import loop

    real, calls = loop.learn, []

    def dies_in_step_three(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(loop, "learn", dies_in_step_three)
    with pytest.raises(KeyboardInterrupt):
        run("killed", "train.save_every=1")
    monkeypatch.undo()
    assert reproducible(run("killed", "train.save_every=1", resume=True)) == reproducible(whole)


@pytest.mark.parametrize("keep", ["on", "off"])
def test_changing_over_is_a_stage_of_its_own_and_counted_once(run, monkeypatch, keep):
    """Both ways take .2 s here: none of it is generation's, and stages add up to no more than the step."""

    def slow(self):
        time.sleep(0.2)

    monkeypatch.setattr(Engine, "take", slow)
    monkeypatch.setattr(Engine, "release", slow)
    row = run(
        "slow", "train.steps=1", "eval.before=false", "eval.after=false", f"rollout.keep_cache={keep}"
    ).read_metrics()[0]
    assert row["time/switch"] == pytest.approx(0.4 if keep == "off" else 0.2, abs=0.05)
    inside = [row[f"time/{stage}"] for stage in STAGES if stage not in ("evaluate", "save")]
    assert sum(inside) <= row["time/step"]
    assert row["rollout/tokens_per_second"] > row["tokens/completion"] / (row["time/rollout"] + 0.01)


def test_sigma_zero_is_bit_identical_to_noise_off(run):
    silent = ["aqn.schedule=constant", "aqn.sigma_start=0"]
    zero = reproducible(run("zero", *silent))
    off = reproducible(run("off", "aqn.enabled=false"))
    for row_zero, row_off in zip(zero, off, strict=True):
        assert {k: v for k, v in row_zero.items() if k != "aqn/stage"} == {
            k: v for k, v in row_off.items() if k != "aqn/stage"
        }


def test_noise_of_explicit_zeros_is_bit_identical_to_noise_off(run, monkeypatch):
    plain = ["diagnostics.every=0", "diagnostics.canary=false"]
    off = reproducible(run("off", "aqn.enabled=false", *plain))
    seen = []

    def recorded(self, *arguments, noise=None, **named):
        if named.get("group_size", 1) > 1:
            seen.append(noise)
        return real(self, *arguments, noise=noise, **named)

    real = Engine.generate
    monkeypatch.setattr(Engine, "generate", recorded)
    # Otherwise a sigma of 0 skips the noise altogether, and there would be nothing to compare.
    monkeypatch.setattr(NoiseState, "silent", False)
    zero = reproducible(run("zero", "aqn.schedule=constant", "aqn.sigma_start=0", *plain))
    assert len(seen) == 4
    for noise in seen:
        assert len(noise.values) == 2 * 2 and not any(z.any() for z in noise.values.values())
    for row_zero, row_off in zip(zero, off, strict=True):
        assert row_zero.pop("aqn/stage", 0) in (0, 1) and row_off.pop("aqn/stage", 0) == 0
        # A run with noise is evaluated with it as well: no noise, no difference.
        assert row_zero.pop("eval/noise_difference", 0.0) == 0.0
        assert row_zero.pop("eval/noisy_accuracy", None) in (None, row_zero.get("eval/accuracy"))
        assert row_zero == row_off


def test_a_norm_that_changes_during_a_rollout_ends_the_run(run, monkeypatch):
    real = Engine.generate

    def meddles(self, *arguments, **named):
        done = real(self, *arguments, **named)
        if named.get("group_size", 1) > 1:
            self.model.norm_weight(1, "mlp_norm").data[3] += 1e-6
        return done

    monkeypatch.setattr(Engine, "generate", meddles)
    with pytest.raises(AssertionError, match="norm scales changed during a rollout"):
        run("meddled", "train.steps=1")


def test_the_demo_learns(tmp_path, data):
    """A fourth of the demo's batch, half its steps: held-out accuracy from about 20 % to well above 50 %."""
    settings = [f"data.train={data}", f"data.eval={data}", f"run.dir={tmp_path}", "log.progress=off", *LEARNS]
    summary = RunDir.open(train(load_config(DEMO, settings))).read_json("summary.json")
    before, after = summary["evaluation"]["before"], summary["evaluation"]["after"]
    assert before["accuracy"] < 0.4
    assert after["low"] > before["high"] and summary["paired"]["low"] > 0.2


def noisy_steps(run_dir):
    rows = [row for row in run_dir.read_metrics() if row.get("aqn/sigma")]
    assert [row["step"] for row in rows] == [3, 4]
    return rows


def test_replayed_noise_and_recomputed_denominator_give_ratio_exactly_one(run):
    for row in noisy_steps(run("r", "objective.denominator=recomputed")):
        assert row["ratio/min"] == row["ratio/max"] == row["ratio/mean"] == 1.0
        assert row["clip_ratio/region_mean"] == 0.0


def test_replayed_noise_and_behavior_denominator_give_ratio_one_within_rounding(base_run):
    for row in noisy_steps(base_run):
        assert abs(row["ratio/min"] - 1) <= 1e-4 and abs(row["ratio/max"] - 1) <= 1e-4
        assert row["sampling/sampling_logp_difference/max"] <= 1e-4


def test_absent_noise_is_visible_in_the_mismatch(run):
    for row in noisy_steps(run("n", "objective.noise=absent", "aqn.sigma_start=0.1")):
        assert row["ratio/max"] == 1.0
        assert row["sampling/sampling_logp_difference/mean"] > 1e-3
        assert row["importance_weight/mean"] != 1.0


def test_kl_to_the_reference_is_zero_at_the_start_and_then_grows(run):
    rows = run("kl", "objective.kl_coef=0.1", "aqn.enabled=false").read_metrics()[1:]
    assert rows[0]["kl"] == pytest.approx(0.0, abs=1e-9)
    assert rows[-1]["kl"] > 1e-8


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_packing_and_recomputation_do_not_change_the_loss(run, base_step, checkpointing):
    small = run("small", "train.token_budget=150", f"train.checkpointing={checkpointing}", "train.steps=1")
    for key in ("loss", "grad_norm", "entropy", "reward"):
        assert small.read_metrics()[1][key] == pytest.approx(base_step.read_metrics()[1][key], rel=1e-4, abs=1e-6), key


def test_run_folder_holds_what_is_promised(run):
    done = run("files", "train.save_every=2", "log.completions=3")
    names = {str(path.relative_to(done.path)) for path in done.path.rglob("*") if path.is_file()}
    expected = {"config.resolved.yaml", "env.json", "metrics.jsonl", "memory.json", "summary.json", "report.html"}
    for step in (2, 4):
        folder = f"checkpoints/checkpoint-{step}"
        expected |= {
            f"{folder}/{name}" for name in ("adapter_model.safetensors", "adapter_config.json", "optimizer.pt")
        }
        expected.add(f"{folder}/trainer_state.json")
    for index in range(4):
        expected |= {f"rollouts/rollout-{index:06d}.parquet", f"completions/step-{index + 1:06d}.txt"}
        expected.add(f"adapters/rollout-{index:06d}/adapter_model.safetensors")
    assert expected <= names
    assert not [name for name in names if ".tmp" in name]
    summary = json.loads(done.summary_path.read_text())
    after = summary["evaluation"]["after"]
    assert summary["status"] == "finished" and after["count"] == 16
    assert after["low"] <= after["accuracy"] <= after["high"]
    predicted, measured = done.read_json("memory.json")["predicted"], done.read_json("memory.json")["measured"]
    for owner in ("base_weights", "dense_cache", "embeddings", "norms", "adapters", "optimizer", "kv_cache"):
        assert measured[owner] <= predicted[owner], owner
    for owner in ("base_weights", "dense_cache", "embeddings", "norms", "adapters", "optimizer"):
        assert measured[owner] == predicted[owner], owner


def test_metrics_of_a_run_are_finite(base_run):
    for row in base_run.read_metrics():
        assert all(math.isfinite(value) for value in row.values())

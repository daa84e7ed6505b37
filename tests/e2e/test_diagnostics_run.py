"""Diagnostics inside a run: they change nothing that is learned, resume to the bit, and say what they should."""

import json
import math
from dataclasses import asdict

import pytest

from qerl.config.load import load_config
from qerl.data.synthetic import arithmetic_problems
from qerl.errors import ConfigError, TrainingError
from qerl.metrics.catalogue import is_reproducible
from qerl.metrics.run_dir import RunDir
from qerl.rollout.engine import Engine
from qerl.train.run import train

SETTINGS = (
    "model.path=demo",
    "model.dtype=float32",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.max_prompt_tokens=96",
    "rollout.max_new_tokens=32",
    "lora.rank=4",
    "optim.lr=1e-3",
    "optim.warmup_ratio=0",
    "train.steps=3",
    "train.save_every=0",
    "aqn.num_stages=3",
    "aqn.sigma_start=0.1",
    "eval.before=false",
    "eval.after=false",
    "log.progress=off",
    "diagnostics.every=1",
    "diagnostics.probe_prompts=3",
)
CANARY = {"canary/adapter_size", "canary/engine_difference"}
MEASURED = ("probe/", "mismatch/", "answers/information", "perturbation/", "canary/")


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Runs the loop under a name with settings on top of SETTINGS; gives the run folder."""
    folder = tmp_path_factory.mktemp("runs")
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps(asdict(problem)) + "\n" for problem in arithmetic_problems("train", 32)))

    def run(name, *settings, resume=False, stop_after=None):
        where = (f"data.train={data}", f"run.dir={folder}", f"run.name={name}")
        config = load_config(None, [*SETTINGS, *where, *settings])
        return RunDir.open(train(config, resume=resume, stop_after=stop_after))

    return run


@pytest.fixture(scope="module")
def measured(start):
    return start("measured")


def values(run_dir, *, measured=True):
    return [
        {k: v for k, v in row.items() if is_reproducible(k) and (measured or not k.startswith(MEASURED))}
        for row in run_dir.read_metrics()
    ]


def test_measuring_changes_nothing_that_is_learned(start, measured):
    plain = start("plain", "diagnostics.every=0", "diagnostics.canary=false")
    assert values(plain) == values(measured, measured=False)
    assert not plain.probe_path.exists()
    assert all(row["time/diagnostics"] > 0 for row in measured.read_metrics())


def test_measurements_resume_to_the_bit(start, measured):
    start("parts", stop_after=1)
    assert values(start("parts", resume=True)) == values(measured)


def test_every_kind_of_measurement_is_there_once_there_is_noise(measured):
    first, *noisy = measured.read_metrics()
    for prefix in MEASURED:
        assert all(any(key.startswith(prefix) for key in row) for row in noisy), prefix
    assert first["aqn/sigma"] == 0.0
    assert not [key for key in first if key.startswith(("perturbation/", "mismatch/noise", "answers/information"))]


def test_every_policy_that_samples_is_seen_to_have_its_adapters_and_its_noise(measured):
    """Policies of updates 0 to 2 by the answers they give in steps 1 to 3, that of the last update by a prompt; and of the first."""
    first, *noisy = measured.read_metrics()
    assert all(row["canary/own/engine_difference"] < 1e-5 for row in (first, *noisy))
    assert not [key for key in first if key.endswith(("_effect", "_share")) and key.startswith("canary/own/")]
    loud, faint = noisy
    for row, cause in ((loud, "adapters"), (loud, "noise"), (faint, "adapters")):
        assert row[f"canary/own/{cause}_effect"] > 1e-4
        assert row[f"canary/own/{cause}_share"] == pytest.approx(1.0, abs=0.01)
    # Noise of a sigma of .0005 is below what rounding leaves to conclude from.
    assert 0.0 < faint["canary/own/noise_effect"] < 1e-5 and "canary/own/noise_share" not in faint
    assert [row.keys() >= CANARY for row in (first, *noisy)] == [True, False, True]


def test_without_noise_there_is_no_information_and_with_it_there_is(measured):
    first, *noisy = measured.read_metrics()
    for average in ("by_token", "by_answer"):
        tempered = first[f"probe/entropy_tempered/{average}"]
        assert first[f"probe/entropy_conditional/{average}"] == first[f"probe/entropy_mixture/{average}"] == tempered
        assert first[f"probe/information/{average}"] == 0.0
        for row in noisy:
            assert 0.0 < row[f"probe/information/{average}"] < row[f"probe/entropy_mixture/{average}"]
    for row in noisy:
        # Bounds in expectation only: of one small batch they may even cross.
        assert abs(row["answers/information_low"]) < math.log(5) and abs(row["answers/information_high"]) < math.log(5)


def test_causes_of_mismatch_are_told_apart(measured):
    """In float32 the kernel term is rounding; noise and the update are orders above it."""
    for row in measured.read_metrics()[1:]:
        kernel, noise, stale = (
            row[f"mismatch/{cause}/max_abs_logp_difference"] for cause in ("kernel", "noise", "staleness")
        )
        assert kernel < 1e-4 and 100 * kernel < min(noise, stale)
        assert row["mismatch/kernel/effective_sample_size"] == pytest.approx(1.0, abs=1e-6)
        assert not [key for key in row if key.startswith("mismatch/truncation")]
        assert row["mismatch/kernel/drawn_differently"] == 0.0, (
            "the keys, positions and order of the engine's own draws"
        )
        assert 0.0 <= row["mismatch/noise/drawn_differently"] < 0.5


def test_noise_absent_from_the_objective_does_not_count_as_kernel_mismatch(start):
    row = start("absent", "objective.noise=absent", stop_after=2).read_metrics()[1]
    assert row["mean_abs_prob_difference"] > 1e-4
    assert row["mismatch/kernel/mean_abs_prob_difference"] < 1e-5 < row["mismatch/noise/mean_abs_prob_difference"]


def test_a_truncated_sampler_shows_its_own_term(start):
    row = start("top-k", "rollout.top_k=2", "rollout.temperature=1.5", "train.steps=1").read_metrics()[0]
    assert 0.3 < row["mismatch/truncation/kept_mass"] < 1.0
    assert row["mismatch/truncation/kl"] > 0.0
    assert "mismatch/kernel/drawn_differently" not in row
    entropies = [row[f"probe/entropy_{name}/by_token"] for name in ("sampler", "raw", "tempered")]
    assert entropies == sorted(entropies)


@pytest.mark.parametrize("scope", ["response", "token"])
def test_every_scope_can_be_measured(start, scope):
    row = start(scope, f"aqn.scope={scope}", "aqn.sharing=independent", stop_after=2).read_metrics()[1]
    assert row["mismatch/kernel/max_abs_logp_difference"] < 1e-4 < row["mismatch/noise/max_abs_logp_difference"]
    assert row["probe/information/by_token"] > 0.0
    assert abs(row["perturbation/q_k/dependence"]) < 0.4


def test_runs_share_a_probe_set_by_its_file(start, measured):
    other = start("other", f"diagnostics.probe={measured.probe_path}", "train.seed=7", "train.steps=1")
    assert other.probe_path.read_text() == measured.probe_path.read_text()
    key = "probe/entropy_raw/by_token"
    assert other.read_metrics()[0][key] == measured.read_metrics()[0][key]


def test_a_probe_set_of_another_tokenizer_is_refused(start, measured, tmp_path):
    value = json.loads(measured.probe_path.read_text())
    path = tmp_path / "probe.json"
    path.write_text(json.dumps({**value, "tokenizer_hash": "0123456789abcdef"}))
    with pytest.raises(ConfigError, match="another tokenizer"):
        start("refused", f"diagnostics.probe={path}")
    with pytest.raises(ConfigError, match="cannot be read"):
        start("missing", f"diagnostics.probe={tmp_path / 'nothing.json'}")


def test_a_dead_canary_stops_the_run_by_name(start, monkeypatch):
    real = Engine.generate

    def without_adapters(self, *args, **kwargs):
        return real(self, *args, **{**kwargs, "adapters": False})

    monkeypatch.setattr(Engine, "generate", without_adapters)
    with pytest.raises(TrainingError, match="canary: the engine ignores the adapters"):
        start("dead", "diagnostics.every=0")


def test_an_engine_that_turns_deaf_at_any_update_is_named_before_the_next(start, monkeypatch):
    """Step 3 of 20, after which no prompt is answered, where adapters move log-probs by less than engine and trainer may differ."""
    real, rollouts = Engine.generate, set()

    def deaf(self, prompts, sampling, **kwargs):
        rollouts.add(sampling.rollout)
        hears = not (sampling.stream == "sample" and sampling.rollout == 2)
        return real(self, prompts, sampling, **{**kwargs, "adapters": hears and kwargs.get("adapters", True)})

    monkeypatch.setattr(Engine, "generate", deaf)
    with pytest.raises(TrainingError, match="canary: the engine ignores the adapters"):
        start("deaf", "diagnostics.every=0", "train.steps=20", "aqn.enabled=false", "optim.lr=1e-4")
    assert max(rollouts) == 2

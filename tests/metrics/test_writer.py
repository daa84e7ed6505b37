import json
import sys
import types

import pytest

from qerl.errors import ConfigError, MissingDependencyError
from qerl.metrics.run_dir import RunDir
from qerl.metrics.writer import MetricsWriter


def test_a_key_outside_the_catalogue_is_refused_before_anything_is_written(tmp_path):
    run = RunDir.create(tmp_path)
    with MetricsWriter(run) as writer, pytest.raises(KeyError, match="rewrad"):
        writer.write(1, {"reward": 1.0, "rewrad": 1.0})
    assert not run.metrics_path.exists()


def test_metrics_go_to_the_run_folder_whatever_the_backends(tmp_path):
    run = RunDir.create(tmp_path)
    with MetricsWriter(run, ()) as writer:
        writer.write(1, {"reward": 0.25, "rewards/accuracy/mean": 0.25, "policy_version": 1})
    assert run.read_metrics() == [{"step": 1, "reward": 0.25, "rewards/accuracy/mean": 0.25, "policy_version": 1}]


@pytest.mark.parametrize("backend", ["tensorboard", "wandb", "trackio"])
def test_a_missing_package_says_how_to_get_it(tmp_path, monkeypatch, backend):
    monkeypatch.setitem(sys.modules, backend, None)
    with pytest.raises(MissingDependencyError, match=f"pip install {backend}"):
        MetricsWriter(RunDir.create(tmp_path), ("jsonl", backend))


def test_an_unknown_backend_names_the_known_ones(tmp_path):
    with pytest.raises(ConfigError, match="Did you mean wandb"):
        MetricsWriter(RunDir.create(tmp_path), ("wandbb",))


class FakeWandb(types.ModuleType):
    """Stands for the package: remembers what it was given."""

    def __init__(self):
        super().__init__("wandb")
        self.started, self.logged, self.finished, self.id = [], [], 0, "run-id-7"

    def init(self, **settings):
        self.started.append(settings)
        return self

    def log(self, metrics, step):
        self.logged.append((step, metrics))

    def finish(self):
        self.finished += 1


def test_wandb_receives_numbers_and_a_resumed_run_continues_the_same_one(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run = RunDir.create(tmp_path / "demo")
    with MetricsWriter(run, ("wandb",), config={"seed": 3}) as writer:
        writer.write(1, {"reward": 1, "kl": None})
    with MetricsWriter(run, ("wandb",), completed_steps=1) as writer:
        writer.write(2, {"reward": 0.5})
    first, second = fake.started
    assert first["name"] == "demo"
    assert first["config"] == {"seed": 3}
    assert (first["id"], first["resume"]) == (None, None)
    assert (second["id"], second["resume"]) == ("run-id-7", "allow")
    assert fake.logged == [(1, {"reward": 1.0}), (2, {"reward": 0.5})]
    assert fake.finished == 2


def test_trackio_receives_numbers(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    with MetricsWriter(RunDir.create(tmp_path / "demo"), ("trackio",), completed_steps=4) as writer:
        writer.write(5, {"reward": 0.5})
    assert fake.started == [{"project": "qerl", "name": "demo", "config": {}, "resume": "allow"}]
    assert fake.logged == [(5, {"reward": 0.5})]


def test_tensorboard_files_hold_each_step_and_a_resume_replaces_what_is_made_again(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = RunDir.create(tmp_path)
    with MetricsWriter(run, ("tensorboard",)) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"reward": step / 8})
    with MetricsWriter(run, ("tensorboard",), completed_steps=2) as writer:
        writer.write(3, {"reward": 0.75})
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("reward")
    assert [(event.step, event.value) for event in events] == [(1, 0.125), (2, 0.25), (3, 0.75)]


def test_the_file_is_complete_after_every_write(tmp_path):
    run = RunDir.create(tmp_path)
    writer = MetricsWriter(run)
    for step in (1, 2, 3):
        writer.write(step, {"reward": 0.5})
        lines = run.metrics_path.read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, step + 1))

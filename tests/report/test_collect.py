import pytest
from fake_run import wilson, write_fake_run

from qerl.errors import RunFolderError
from qerl.metrics.run_dir import RunDir
from qerl.report.collect import Evaluation, changed_settings, difference, memory_owners, read_run, warnings_of
from qerl.report.samples import PER_OUTCOME


def evaluation(step, accuracy, low, high):
    return Evaluation(
        step=step,
        accuracy=accuracy,
        low=low,
        high=high,
        count=None,
        truncated=None,
        unparsable=None,
        mean_length=None,
        confidence=0.95,
    )


def test_without_paired_rows_the_difference_is_newcombes(tmp_path):
    run = read_run(write_fake_run(tmp_path / "run", steps=4, finished=False).path)
    # Newcombe (1998), table II, (a): 56/70 and 48/80 give .20 with .0524 to .3339 by method 10. Order: 48/80 is first.
    before = evaluation(0, 48 / 80, *wilson(48 / 80, 80))
    after = evaluation(4, 56 / 70, *wilson(56 / 70, 70))
    found = difference(run, before, after)
    assert found.value == pytest.approx(0.2)
    assert found.low == pytest.approx(0.0524, abs=1e-4)
    assert found.high == pytest.approx(0.3339, abs=1e-4)
    assert not found.paired


def test_the_paired_difference_of_the_summary_is_preferred(tmp_path):
    run = read_run(write_fake_run(tmp_path / "run", steps=4).path)
    found = difference(run, run.evaluations[0], run.evaluations[-1])
    assert (found.value, found.low, found.high, found.paired) == (0.47, 0.424, 0.516, True)
    assert (found.gained, found.lost) == (247, 12)


def test_evaluations_come_from_metrics_and_summary_once_each(tmp_path):
    run = read_run(write_fake_run(tmp_path / "run", steps=25).path)
    assert [point.step for point in run.evaluations] == [0, 10, 20, 25]
    assert run.evaluations[-1].accuracy == 0.912
    assert [row["step"] for row in run.metrics] == list(range(1, 26))


def test_only_settings_that_differ_from_the_defaults_are_listed(tmp_path):
    run = read_run(write_fake_run(tmp_path / "run", steps=4).path)
    changed = {setting.key: (setting.value, setting.default) for setting in changed_settings(run.config)}
    assert changed["lora.rank"] == (16, 32)
    assert changed["model.path"] == ("demo", None)
    assert "lora.alpha" not in changed
    assert "lora.targets" not in changed
    assert "quant.overrides" not in changed


def test_a_setting_that_this_version_does_not_know_is_listed():
    assert [(s.key, s.default) for s in changed_settings({"optim": {"lion": True}})] == [("optim.lion", None)]


def test_crossed_alarm_lines_are_told_with_the_worst_value(tmp_path):
    run = RunDir.create(tmp_path / "run")
    for step, value in enumerate((0.001, 0.006, 0.02), start=1):
        run.append_metrics(step, {"mean_abs_prob_difference": value})
    told = warnings_of(read_run(run.path))
    fault = next(text for text in told if "mean_abs_prob_difference" in text)
    assert fault.startswith("Fault")
    assert "1 of 3 steps" in fault
    assert "highest 0.02" in fault


def test_alarm_lines_do_not_hold_for_noise_that_the_trainer_leaves_out(tmp_path):
    run = RunDir.create(tmp_path / "run")
    run.write_text(run.config_path, "objective: {noise: absent}\naqn: {enabled: true}\n")
    run.append_metrics(1, {"mean_abs_prob_difference": 0.02})
    assert not [text for text in warnings_of(read_run(run.path)) if "mean_abs" in text]


def test_the_kernel_terms_alarm_lines_hold_whatever_the_trainer_leaves_out(tmp_path):
    run = RunDir.create(tmp_path / "run")
    run.write_text(run.config_path, "objective: {noise: absent}\naqn: {enabled: true}\n")
    key = "mismatch/kernel/mean_abs_prob_difference"
    run.append_metrics(1, {"mean_abs_prob_difference": 0.02, key: 0.007})
    (told,) = [text for text in warnings_of(read_run(run.path)) if "mean_abs" in text]
    assert told.startswith(f"Warning: {key} was above 0.005")


def test_an_alarm_that_the_run_itself_told_is_not_told_twice(tmp_path):
    run = RunDir.create(tmp_path / "run")
    run.append_metrics(1, {"mean_abs_prob_difference": 0.02})
    run.write_json(
        "summary.json", {"status": "finished", "warnings": ["fault: mean_abs_prob_difference is above 0.01"]}
    )
    assert warnings_of(read_run(run.path)) == ["fault: mean_abs_prob_difference is above 0.01"]


def test_an_interrupted_run_is_told(tmp_path):
    run = write_fake_run(tmp_path / "run", steps=40, done=7)
    run.write_json("summary.json", run.read_json("summary.json") | {"status": "interrupted"})
    assert warnings_of(read_run(run.path))[0] == "This run was interrupted at step 7 of 40."


def test_memory_owners_keep_what_only_one_side_knows(tmp_path):
    run = RunDir.create(tmp_path / "run")
    run.append_metrics(1, {"reward": 0.0})
    run.write_json(run.memory_path, {"predicted": {"a_b": 10, "none": 0}, "measured": {"c": 30, "none": 0}})
    owners = memory_owners(read_run(run.path))
    assert [(owner.name, owner.predicted, owner.measured) for owner in owners] == [("c", None, 30), ("a b", 10, None)]


def test_samples_are_of_the_first_and_last_rollout_and_of_every_outcome(tmp_path):
    run = read_run(write_fake_run(tmp_path / "run", steps=20).path)
    early, late = run.samples
    assert (early.when, early.rollout, late.when, late.rollout) == ("early", 0, "late", 19)
    assert sum(early.counts.values()) == 48
    for part in run.samples:
        shown = {name: sum(s.outcome == name for s in part.samples) for name in part.counts}
        assert shown == {name: min(count, PER_OUTCOME) for name, count in part.counts.items()}
    assert len({sample.question for sample in late.samples if sample.outcome == "correct"}) == PER_OUTCOME


def test_one_rollout_is_early_alone(tmp_path):
    run = write_fake_run(tmp_path / "run", steps=20)
    for _, path in run.rollout_paths()[1:]:
        path.unlink()
    assert [part.when for part in read_run(run.path).samples] == ["early"]


def test_settings_that_a_broken_copy_left_are_named(tmp_path):
    run = RunDir.create(tmp_path / "run")
    for damage in (b"aqn: {enabled\n", b"- a\n", b"\xff\xfe"):
        run.config_path.write_bytes(damage)
        with pytest.raises(RunFolderError, match=r"config\.resolved\.yaml: .*expected the settings of a run"):
            read_run(run.path)

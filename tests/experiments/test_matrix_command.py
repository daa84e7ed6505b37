"""``qerl matrix`` and ``qerl results`` as a user types them; cells in processes of their own."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

from matrix_builders import ARMS, write_matrix
from typer.testing import CliRunner

from qerl.cli import app
from qerl.experiments.manifest import Manifest
from qerl.metrics.run_dir import RunDir


def qerl(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_dry_run_lists_the_cells_and_makes_nothing(tmp_path):
    path = write_matrix(tmp_path, arms=[*ARMS, {"name": "broken", "set": {"lora.rank": 0}}])
    result = qerl("matrix", path, "--out", tmp_path / "out", "--dry-run")
    assert result.exit_code == 1
    assert "broken-s0  INVALID: lora.rank" in result.output and "plain-s0   waiting" in result.output
    assert not (tmp_path / "out").exists()
    for orders, words in (
        (["--cell", "plain-s9"], "no such cell"),
        (["--strict"], "cells cannot run"),
        (["--jobs", "2", "--one-process"], "one after another"),
        (["--match"], "finds no temperatures"),
    ):
        refused = qerl("matrix", path, "--out", tmp_path / "out", "--dry-run", *orders)
        assert refused.exit_code == 2 and words in " ".join(refused.stderr.split()), orders


def test_a_dry_run_says_why_a_cell_has_failed(tmp_path):
    path, out = write_matrix(tmp_path), tmp_path / "out"
    error = "OutOfMemoryError: CUDA out of memory. Tried to allocate 404.00 MiB. " + "Process 1 has 53 GiB in use. " * 5
    Manifest(out).set_state("plain-s0", "failed", arm="plain", seed=0, phase="run", axes={}, error=error)
    lines = qerl("matrix", path, "--out", out, "--dry-run").output.splitlines()
    (line,) = (line for line in lines if line.startswith("  plain-s0"))
    assert line.split("  ")[-1] == "failed: OutOfMemoryError: CUDA out of memory; --retry runs it again"


def test_an_evaluation_that_has_changed_since_some_cells_had_it_is_refused(tmp_path):
    finals = [{"name": "sampled", "temperature": 1.0}]
    path = write_matrix(tmp_path, arms=ARMS[:1], set={"train.steps": 1}, final=finals)
    assert qerl("matrix", path, "--out", tmp_path / "out", "--one-process").exit_code == 0
    assert qerl("matrix", path, "--out", tmp_path / "out", "--one-process").exit_code == 0
    write_matrix(tmp_path, arms=ARMS[:1], set={"train.steps": 1}, final=[{"name": "sampled", "temperature": 0.5}])
    refused = qerl("matrix", path, "--out", tmp_path / "out", "--one-process")
    assert refused.exit_code == 2 and "has changed that some cells have had" in " ".join(refused.stderr.split())


def test_an_evaluation_that_is_asked_for_later_is_made_of_finished_cells_too(tmp_path):
    """As long as their checkpoint is there; where it is not, that is said, and the cell stays as it is."""
    run = RunDir(tmp_path / "out" / "plain-s0")
    finals = [{"name": "sampled", "temperature": 1.0}, {"name": "greedy"}, {"name": "third"}]
    command = ("matrix", tmp_path / "matrix.yaml", "--out", tmp_path / "out", "--one-process")
    for count in (1, 2):
        write_matrix(tmp_path, arms=ARMS[:1], set={"train.steps": 1}, final=finals[:count])
        assert qerl(*command).exit_code == 0
        assert list(run.read_json("final.json")) == ["sampled", "greedy"][:count]
        assert Manifest(tmp_path / "out").cell("plain-s0")["state"] == "finished"
    # The same weights, policy and questions as the evaluation after training.
    made, after = run.read_json("final.json")["greedy"], run.read_json("summary.json")["evaluation"]["after"]
    assert made["accuracy"] == after["accuracy"] and made["mean_length"] == after["mean_length"]
    shutil.rmtree(run.checkpoints_dir)
    write_matrix(tmp_path, arms=ARMS[:1], set={"train.steps": 1}, final=finals)
    done = qerl(*command)
    assert done.exit_code == 0 and "finished without third, and its checkpoint is not here" in " ".join(
        done.stderr.split()
    )
    assert Manifest(tmp_path / "out").cell("plain-s0")["state"] == "finished"


def test_an_evaluation_under_noise_needs_an_arm_with_noise(tmp_path):
    path = write_matrix(tmp_path, arms=ARMS[:1], final=[{"name": "noisy", "noise": "last"}])
    refused = qerl("matrix", path, "--out", tmp_path / "out", "--dry-run")
    assert refused.exit_code == 2 and "no arm is trained with noise" in " ".join(refused.stderr.split())


def test_mistakes_end_in_a_message(tmp_path):
    path = write_matrix(tmp_path)
    for arguments, words in (
        (["lora.rank=2"], "one matrix file is needed"),
        ([path, "aqn.enabled=false"], "what the arms differ in"),
        ([path, "--cell", "plain-s7"], "no such cell"),
    ):
        result = qerl("matrix", *arguments, "--out", tmp_path / "out")
        assert result.exit_code == 2, result.output
        assert words in " ".join(result.stderr.split())


def test_a_cell_has_a_process_of_its_own_and_the_results_are_a_table(tmp_path):
    path = write_matrix(tmp_path, arms=ARMS[:1], set={"train.steps": 1})
    result = qerl("matrix", path, "--out", tmp_path / "out", "--max-minutes", "30", "--no-portable")
    assert result.exit_code == 0, result.output
    assert "1 finished" in result.output and not (tmp_path / "out" / "portable").exists()
    assert Manifest(tmp_path / "out").cell("plain-s0")["own_process"] is True
    cell = json.loads((tmp_path / "out" / "plain-s0" / "cell.json").read_text())
    assert cell["peak_memory"]["of"] == "process, resident" and cell["steps"] == 1
    table = qerl("results", tmp_path / "out", "--write", tmp_path / "results").output
    assert "| NVFP4 LoRA | " in table
    assert (tmp_path / "results" / "small" / "plain-s0" / "summary.json").exists()


def test_a_cell_whose_command_was_killed_carries_itself(tmp_path):
    """A cell's process leaves that to the command that has started it, as long as that is there."""
    path = write_matrix(tmp_path, set={"train.steps": 1})
    command = ("matrix", path, "--out", tmp_path / "out", "--one-process", "--cell", "plain-s0", "--started-by")
    assert qerl(*command, os.getppid()).exit_code == 0
    portable = tmp_path / "out" / "portable"
    assert not portable.exists()
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    assert qerl(*command, killed.pid, "--no-portable").exit_code == 0 and not portable.exists()
    assert qerl(*command, killed.pid, "--match").exit_code == 0 and not portable.exists()
    assert qerl(*command, killed.pid).exit_code == 0
    assert {entry.name for entry in portable.iterdir() if entry.is_dir()} == {"plain-s0"}
    assert RunDir(portable / "plain-s0").read_json("cell.json")["steps"] == 1
    assert Manifest(portable).cell("plain-s0")["state"] == "finished"


def test_ctrl_c_reaches_every_running_cell_which_stops_after_its_step(tmp_path):
    path = write_matrix(tmp_path, set={"train.steps": 400, "log.progress": "plain"})
    command = [sys.executable, "-m", "qerl", "matrix", str(path), "--out", str(tmp_path / "out"), "--jobs", "2"]
    printed = tmp_path / "printed"
    told = tmp_path / "told"
    process = subprocess.Popen(command, stdout=printed.open("w"), stderr=told.open("w"))
    metrics = tmp_path / "out" / "noisy-s0" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") > 2) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) == 130
    names = {line.partition(": ")[0] for line in printed.read_text().splitlines()}
    assert "--resume" not in told.read_text() + printed.read_text()
    assert names == {"plain-s0", "noisy-s0"}, "every line says whose it is"
    for name in ("plain-s0", "noisy-s0"):
        assert Manifest(tmp_path / "out").cell(name)["state"] == "stopped"
        assert re.search(
            f"{name}: stopped by SIGTERM after step .* is saved. The same matrix command goes on", told.read_text()
        )
        assert list((tmp_path / "out" / "portable" / name / "checkpoints").glob("*/portable.npz"))


def test_a_mistaken_command_loses_nothing_that_was_reached(tmp_path):
    """One wrong word, or a data set that is away for a day, must not cost the cells that are done."""
    out = tmp_path / "out"
    path = write_matrix(tmp_path, arms=ARMS[:1], set={"train.steps": 1})
    assert qerl("matrix", path, "--out", out, "--one-process").exit_code == 0
    before = (out / "matrix.json").read_text()
    for settings, words in ((["nonsense=1"], "nonsense"), (["data.train=nowhere.jsonl"], "nowhere.jsonl")):
        result = qerl("matrix", path, *settings, "--out", out)
        assert result.exit_code == 2, result.output
        assert "no cell of the matrix can run" in " ".join(result.stderr.split()) and words in result.stderr
        assert (out / "matrix.json").read_text() == before
    again = qerl("matrix", path, "--out", out, "--one-process")
    assert again.exit_code == 0 and "1 finished" in again.output


def test_a_cell_that_is_invalid_today_keeps_its_result(tmp_path):
    out = tmp_path / "out"
    arms = [ARMS[0], {"name": "other", "set": {"lora.rank": 2}}]
    path = write_matrix(tmp_path, arms=arms, set={"train.steps": 1}, seeds=[0])
    assert qerl("matrix", path, "--out", out, "--one-process").exit_code == 0
    write_matrix(
        tmp_path, arms=[arms[0], {"name": "other", "set": {"lora.rank": 0}}], set={"train.steps": 1}, seeds=[0]
    )
    wrong = qerl("matrix", path, "--out", out, "--one-process")
    assert wrong.exit_code == 1 and "other-s0: invalid, left out: lora.rank" in " ".join(wrong.stderr.split())
    assert Manifest(out).cell("other-s0")["state"] == "finished" and Manifest(out).cell("other-s0")["problem"]
    write_matrix(tmp_path, arms=arms, set={"train.steps": 1}, seeds=[0])
    again = qerl("matrix", path, "--out", out, "--one-process")
    assert again.exit_code == 0 and "2 finished" in again.output
    assert "problem" not in Manifest(out).cell("other-s0")


def test_a_matrix_and_a_run_do_not_share_a_folder(tmp_path):
    out = tmp_path / "out"
    path = write_matrix(tmp_path, arms=ARMS[:1], set={"train.steps": 1})
    assert qerl("matrix", path, "--out", out, "--one-process").exit_code == 0
    train = qerl("train", "configs/demo.yaml", f"run.dir={tmp_path}", "run.name=out", "train.steps=1")
    assert train.exit_code == 2 and "the run folder is that of a matrix" in " ".join(train.stderr.split())
    other = qerl("matrix", path, "--out", out / "plain-s0")
    assert other.exit_code == 2 and "the folder of the matrix holds a run" in " ".join(other.stderr.split())


def test_places_and_manifests_that_cannot_be_are_messages(tmp_path):
    path = write_matrix(tmp_path)
    (tmp_path / "file").write_text("x")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        for more in ((), ("--dry-run",)):
            result = qerl("matrix", path, "--out", out, *more)
            assert result.exit_code == 2 and "Traceback" not in result.output, result.output
    for text in ("[]", '{"schema": 1}'):
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "matrix.json").write_text(text)
        result = qerl("matrix", path, "--out", tmp_path / "out")
        assert result.exit_code == 2 and "manifest of the matrix is damaged" in result.stderr
    result = qerl("matrix", write_matrix(tmp_path, axes={"optim.lr": []}), "--dry-run")
    assert result.exit_code == 2 and "axes" in result.stderr
    close = write_matrix(tmp_path, axes={"optim.lr": [0.001, 0.0010000001]})
    assert "plain-lr0.0010000001-s0" in qerl("matrix", close, "--dry-run", "--out", tmp_path / "new").output


def test_what_is_no_folder_is_not_taken_for_one(tmp_path):
    path, out = write_matrix(tmp_path), tmp_path / "out"
    for name, place, words in (
        ("noisy-s0", out / "noisy-s0", "no folder has the name of a cell's"),
        ("locks", out / ".running", "cannot be written"),
    ):
        out.mkdir(exist_ok=True)
        place.write_text("mine")
        shown = qerl("matrix", path, "--out", out, "--one-process")
        assert shown.exit_code == 2 and words in " ".join(shown.stderr.split()), (name, shown.output, shown.stderr)
        assert place.read_text() == "mine" and not (out / "plain-s0").exists()
        place.unlink()

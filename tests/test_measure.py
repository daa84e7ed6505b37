"""The list of measurements and its runner, with commands that need no GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml

ROOT = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("measure", ROOT / "scripts" / "measure.py")
measure = importlib.util.module_from_spec(spec)
sys.modules["measure"] = measure
spec.loader.exec_module(measure)


@pytest.fixture
def run(tmp_path, capsys):
    """Runs a list of jobs; gives exit status, what was printed, and the records by name."""

    def call(jobs, *options, name="jobs.yaml"):
        path = tmp_path / name
        path.write_text(yaml.safe_dump({"jobs": [{"kind": "benchmark", "seconds": 20} | job for job in jobs]}))
        status = measure.main([str(path), "--out", str(tmp_path / "out"), *options])
        records = {file.parent.name: json.loads(file.read_text()) for file in (tmp_path / "out").glob("*/job.json")}
        return status, capsys.readouterr().out, records

    return call


def test_a_job_has_its_folder_gpu_interpreter_and_record(run, tmp_path):
    command = (
        "python -c 'import os, sys, yaml; print(sys.executable, os.environ[\"CUDA_VISIBLE_DEVICES\"])' > $OUT/made; pwd"
    )
    status, told, records = run([{"name": "one", "command": command}], "--gpus", "3")
    made, gpu = (tmp_path / "out" / "one" / "made").read_text().split()
    assert status == 0 and "one: ok" in told
    assert Path(made).resolve() == Path(sys.executable).resolve() and gpu == "3"
    assert (tmp_path / "out" / "one" / "log.txt").read_text().strip() == str(ROOT)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert records["one"]["ended"] == "ok" and records["one"]["commit"] == head.stdout.strip()


def test_a_failure_is_told_and_the_rest_goes_on_and_what_ended_well_is_not_done_again(run, tmp_path):
    jobs = [{"name": "bad", "command": "exit 3"}, {"name": "good", "command": f"echo x >> {tmp_path}/times"}]
    status, _, records = run(jobs)
    assert status == 1 and records["bad"]["ended"] == "exit 3" and records["good"]["ended"] == "ok"
    jobs[0]["command"] = "true"
    status, told, records = run(jobs)
    assert status == 0 and "good: has ended well already" in told and records["bad"]["ended"] == "ok"
    assert (tmp_path / "times").read_text() == "x\n"


def test_a_job_is_killed_with_what_it_has_started(run, tmp_path):
    command = f"(sleep 1.2; touch {tmp_path}/late) & sleep 30"
    status, _, records = run([{"name": "slow", "command": command, "seconds": 0.4}])
    assert status == 1 and records["slow"]["ended"] == "killed after 0.4 s" and records["slow"]["took"] < 5
    time.sleep(1.2)
    assert not (tmp_path / "late").exists()


def test_what_does_not_fit_is_left_out_and_a_shorter_job_runs(run):
    jobs = [{"name": "long", "command": "true", "seconds": 50}, {"name": "short", "command": "true", "seconds": 2}]
    status, told, records = run(jobs, "--seconds", "10")
    assert status == 1 and records.keys() == {"short"}
    assert "long: left out: it may take 50 s and 10 are left" in told


def test_jobs_alone_have_a_gpu_to_themselves_and_others_share_one(run, tmp_path):
    """Each job notes who runs at its end: itself and those that began before and have not ended."""
    note = (
        "touch {0}/on/$CUDA_VISIBLE_DEVICES.{1}; sleep .3; ls {0}/on > $OUT/seen; rm {0}/on/$CUDA_VISIBLE_DEVICES.{1}"
    )
    (tmp_path / "on").mkdir()
    shared, alone = ("a", "b", "c"), ("d", "e", "f", "g")
    jobs = [
        {"name": name, "command": note.format(tmp_path, name), "alone": name in alone}
        for name in (*shared, *alone)
    ]  # fmt: skip
    status, _, records = run(jobs, "--gpus", "0,1", "--beside", "2")
    assert status == 0
    beside = {
        name: {entry for entry in (tmp_path / "out" / name / "seen").read_text().split() if entry[0] == record["gpu"]}
        for name, record in records.items()
    }
    assert all(beside[name] == {f"{records[name]['gpu']}.{name}"} for name in alone)
    assert records["a"]["gpu"] == records["b"]["gpu"] == "0" and len(beside["a"] | beside["b"]) == 2
    assert records["c"]["gpu"] == "1" and {records[name]["gpu"] for name in alone} == {"0", "1"}


def test_a_quiet_job_has_the_machine_to_itself_and_no_later_one_goes_before_it(run, tmp_path):
    note = "touch {0}/on/{1}; sleep .2; ls {0}/on > $OUT/seen; rm {0}/on/{1}"
    (tmp_path / "on").mkdir()
    jobs = [
        {"name": name, "command": note.format(tmp_path, name), "alone": False, "quiet": name == "quiet"}
        for name in ("a", "b", "quiet", "c", "d")
    ]
    status, _, _ = run(jobs, "--gpus", "0,1", "--beside", "1")
    seen = {job["name"]: (tmp_path / "out" / job["name"] / "seen").read_text().split() for job in jobs}
    assert status == 0 and seen["quiet"] == ["quiet"]
    assert {*seen["a"], *seen["b"]} == {"a", "b"} and {*seen["c"], *seen["d"]} == {"c", "d"}


def test_files_are_collected_and_those_of_jobs_that_were_cut_say_so(run, tmp_path):
    jobs = [
        {"name": "good", "command": "echo '{\"rows\": 1}' > $OUT/good.json", "writes": ["good.json"]},
        {
            "name": "cut",
            "command": 'echo \'{"rows": 2, "note": "Own."}\' > $OUT/cut.json; echo \'{\' > $OUT/half.json; sleep 9',
            "writes": ["cut.json", "half.json"],
            "seconds": 0.3,
        },
        {"name": "late", "command": "true", "writes": ["late.json"], "seconds": 30},
    ]
    status, told, _ = run(jobs, "--seconds", "25")
    table = [line.split() for line in told.partition("files\n")[2].splitlines()]
    assert status == 1 and [(row[0], row[1]) for row in table] == [("good", "ok"), ("cut", "killed"), ("late", "left")]
    assert table[0][-1] == "good.json" and table[1][-1] == "cut.json"
    target = tmp_path / "results"
    status, told, _ = run(jobs, "--collect", str(target))
    assert status == 1 and told.splitlines() == [
        "good.json: whole",
        "cut.json: CUT (killed after 0.3 s)",
        "half.json: missing (cut: killed after 0.3 s)",
        "late.json: missing (late: not run)",
    ]
    assert sorted(path.name for path in target.iterdir()) == ["cut.json", "good.json"]
    assert json.loads((target / "cut.json").read_text())["note"] == (
        "Own. The job was cut (killed after 0.3 s): what is missing was not reached."
    )
    assert run(jobs, "--only", "good", "--collect", str(target))[0] == 0


def test_needs_are_looked_for_before_anything_runs(run):
    jobs = [
        {"name": "model", "command": "true", "models": ["no-such-model"]},
        {"name": "package", "command": "true", "packages": ["no_such_package"]},
        {"name": "demo", "command": "true", "models": ["demo"], "packages": ["torch"]},
    ]
    status, told, records = run(jobs)
    assert status == 1 and records.keys() == {"demo"}
    assert "model: left out: no model no-such-model here" in told
    assert "package: left out: no package no_such_package here" in told


def test_names_and_kinds_choose_and_a_dry_run_runs_nothing(run, tmp_path):
    jobs = [{"name": name, "command": f"touch {tmp_path}/{name}", "kind": kind} for name, kind in ("ax", "by", "cx")]
    jobs[2]["alone"] = False
    _, told, records = run(jobs, "--only", "c,a", "--dry-run")
    assert [line.split(":")[0] for line in told.splitlines()[:2]] == ["c", "a"] and not records
    assert told.splitlines()[2:] == [
        "x: 20 s of GPUs alone, 20 s beside each other",
        "in all: 20 s of GPUs alone, 20 s beside each other",
    ]
    assert run(jobs, "--kind", "y")[2].keys() == {"b"}


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        ("jobs: [", (), "no list of jobs"),
        ("jobs: [{name: a, kind: b, command: c, seconds: 0}]", (), "greater than 0"),
        ("jobs: [{name: a, kind: b, command: c, seconds: 1, gpu: 2}]", (), "gpu"),
        ("jobs: [{name: a, kind: b, command: c, seconds: 1}, {name: a, kind: b, command: c, seconds: 1}]", (), "jobs of one name: a"),
        ("jobs: [{name: abc, kind: b, command: c, seconds: 1}]", ("--only", "abd"), "did you mean abc?"),
        ("jobs: []", ("--gpus", ","), "--gpus needs"),
    ],
)  # fmt: skip
def test_a_wrong_list_or_option_ends_with_2(tmp_path, capsys, content, options, said):
    (tmp_path / "jobs.yaml").write_text(content)
    with pytest.raises(SystemExit) as caught:
        measure.main([str(tmp_path / "jobs.yaml"), "--out", str(tmp_path / "out"), *options])
    assert caught.value.code == 2 and said in capsys.readouterr().err


def test_a_list_that_is_no_text_and_places_that_cannot_be_written_are_refused(tmp_path, capsys):
    taken, unread = tmp_path / "file", tmp_path / "bytes.yaml"
    unread.write_bytes(b"\xff\xfe")
    taken.write_text("jobs: []")
    for words, said in (
        ((unread,), "no list of jobs"),
        ((taken, "--out", taken), "file cannot be written"),
        ((taken, "--collect", taken), "file cannot be written"),
    ):
        with pytest.raises(SystemExit) as caught:
            measure.main(list(map(str, words)))
        assert caught.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize(("name", "how"), [("log.txt", "not started"), ("job.json", "no record")])
def test_a_job_whose_files_cannot_be_written_is_told_and_the_next_one_runs(tmp_path, capsys, name, how):
    """As on a full disk: a thread that ended without a word left the program waiting for ever."""
    (tmp_path / "out" / "full" / name).mkdir(parents=True)
    jobs = tmp_path / "jobs.yaml"
    jobs.write_text(
        yaml.safe_dump({"jobs": [{"name": n, "kind": "x", "command": "true", "seconds": 20} for n in ("full", "next")]})
    )
    assert measure.main([str(jobs), "--out", str(tmp_path / "out")]) == 1
    assert f"full: {how}: " in capsys.readouterr().out and measure.how_ended(tmp_path / "out" / "next") == "ok"


def test_sigterm_ends_the_jobs_too(run, tmp_path):
    """They are in sessions of their own: nobody else would end them."""
    asked = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    asked.start()
    status, _, records = run([{"name": "slow", "command": f"sleep 1; touch {tmp_path}/late"}])
    assert status == 143 and records["slow"]["ended"] == "stopped" and records["slow"]["took"] < 0.9
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    time.sleep(0.9)
    assert not (tmp_path / "late").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_the_list_of_the_repository_is_refused_where_there_is_no_gpu(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        measure.main(["--out", str(tmp_path / "out")])
    assert caught.value.code == 2 and "there is no CUDA device 0" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


JOBS = measure.read_jobs(measure.JOBS).jobs


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_every_job_of_the_list_names_what_exists_and_writes_what_it_says(job):
    for name in job.writes:
        assert f"$OUT/{name}" in job.command
    for word in job.command.replace("$OUT/", "").split():
        if word.startswith(("tests/", "benchmarks/", "scripts/", "configs/")):
            assert (ROOT / word).exists(), word
    words = job.command.split()
    for before, name in pairwise(words):
        if before == "bench":
            assert (ROOT / "benchmarks" / f"{name}.py").exists(), name


def test_every_folder_with_tests_for_a_gpu_is_run():
    marked = {path.parent for path in (ROOT / "tests").rglob("*.py") if re.search(r"\bmark\.gpu\b", path.read_text())}
    named = {ROOT / word for job in JOBS if job.kind == "tests" for word in job.command.split() if word[:6] == "tests/"}
    assert marked - {ROOT / "tests"} <= named


def test_a_file_has_one_job():
    written = [name for job in JOBS for name in job.writes]
    assert len(written) == len(set(written))

"""Everything that is measured on a GPU machine, job by job: tests on the device, benchmarks, and the files under results/.

    python scripts/measure.py [JOBS.yaml] [--out measured] [--gpus 0,1] [--seconds 1200] [--only NAME,NAME] [--kind tests,kernels] [--dry-run]
    python scripts/measure.py [JOBS.yaml] --out DIR --collect results

The list (default: benchmarks/jobs.yaml) says of each job its command, the seconds it may take, whether it needs a GPU or the whole machine to itself, what
it needs beside the repository, and the files that it writes. Jobs begin in the list's order on the first GPU that is free; one that does not fit into what
is left of `--seconds` is left out, and a later, shorter one may run. Jobs that need no GPU to themselves run beside each other, up to `--beside` on one.

DIR/NAME holds a job's files (`$OUT` in its command), its output (log.txt) and job.json: command, commit, GPU, exit status, seconds. A job is killed with
all it has started when its seconds are over; benchmarks write their files as they go. What job.json says ended well is not run again.

At the end there is a table of the jobs, and of their files. `--collect` runs nothing: it copies the files that the jobs of DIR have written, those of jobs
that were cut too, which it tells and writes into their `note`.
Exit status 0: all that was asked for has ended well; 1: a job failed, was killed or was left out; 2: the list or an option is wrong; 130, 143 or 129: Ctrl-C,
SIGTERM or a closed terminal, which end the jobs too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from qerl.errors import CheckpointError, nearest  # noqa: E402
from qerl.model.locate import resolve_model_path  # noqa: E402
from qerl.signals import Signals  # noqa: E402

JOBS = ROOT / "benchmarks" / "jobs.yaml"


class Job(BaseModel):
    """One entry of the list.

    Attributes:
        kind: what `--kind` chooses by.
        command: for bash, in the repository's root; `$OUT` is the job's folder, `python` this interpreter.
        seconds: limit.
        alone: needs a GPU to itself, because its times are reported.
        quiet: needs the machine to itself, because the host's work is part of its times.
        models: checkpoints that must be there, by name.
        packages: modules that must be importable.
        writes: files of `$OUT` that belong into results/.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[a-z0-9_]+$")
    kind: str
    command: str
    seconds: float = Field(gt=0)
    alone: bool = True
    quiet: bool = False
    models: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    def lacks(self) -> list[str]:
        """What this machine does not have of what the job needs."""
        missing = [f"package {name}" for name in self.packages if importlib.util.find_spec(name) is None]
        for name in self.models:
            try:
                resolve_model_path(name)
            except CheckpointError:
                missing.append(f"model {name}")
        return missing


class JobList(BaseModel):
    """The whole list; no name stands in it twice. With `cuda` its jobs need the GPUs that are named, else the numbers are only handed on."""

    model_config = ConfigDict(extra="forbid")

    jobs: tuple[Job, ...]
    cuda: bool = False

    @model_validator(mode="after")
    def _no_name_twice(self) -> JobList:
        names = [job.name for job in self.jobs]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"jobs of one name: {', '.join(twice)}")
        return self


class Measurement:
    """Runs jobs on GPUs until all have ended or the time is over.

    Args:
        out: folder of all jobs; made.
        gpus: their numbers, as CUDA_VISIBLE_DEVICES takes them.
        seconds: for everything; None is without a limit.
        beside: jobs on one GPU at a time, of those that need none to themselves.
    """

    def __init__(self, jobs: Sequence[Job], out: Path, gpus: Sequence[str], seconds: float | None, beside: int):
        self.ended: dict[str, str] = {}
        self._waiting = list(jobs)
        self._out, self._gpus, self._beside = out, gpus, beside
        self._began = time.monotonic()
        self._seconds = seconds
        self._running: dict[str, list[Job]] = {gpu: [] for gpu in gpus}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._changed = threading.Condition()
        self._stopped = False
        self._commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()
        tools = out / ".bin"
        tools.mkdir(parents=True, exist_ok=True)
        # Not a link: outside its virtual environment an interpreter does not find what is installed there.
        (tools / "python").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
        (tools / "python").chmod(0o755)
        self._environment = os.environ | {
            "PATH": f"{tools.resolve()}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT)))),
            "PYTHONUNBUFFERED": "1",
        }

    def run(self) -> dict[str, str]:
        """How each job ended: "ok", "exit N", "killed after N s", or why it was left out."""
        threads = []
        try:
            with self._changed:
                while self._waiting or any(self._running.values()):
                    for gpu in self._gpus:
                        while (job := self._next(gpu)) is not None:
                            self._running[gpu].append(job)
                            threads.append(threading.Thread(target=self._run, args=(job, gpu), daemon=True))
                            threads[-1].start()
                    if any(self._running.values()):
                        self._changed.wait()
        except KeyboardInterrupt:
            self._stopped = True
            raise
        finally:
            for process in list(self._processes.values()):
                kill(process)
            for thread in threads:
                thread.join()
        return self.ended

    def _left(self) -> float:
        return float("inf") if self._seconds is None else self._seconds - (time.monotonic() - self._began)

    def _next(self, gpu: str) -> Job | None:
        """The job to begin on a GPU now; those that cannot end in time leave the list."""
        for job in list(self._waiting):
            if job.seconds > self._left():
                self._waiting.remove(job)
                self._tell(job, f"left out: it may take {job.seconds:g} s and {max(0, self._left()):.0f} are left")
                continue
            running, elsewhere = self._running[gpu], [job for jobs in self._running.values() for job in jobs]
            if elsewhere and (job.quiet or elsewhere[0].quiet):
                return None
            if running and (job.alone or running[0].alone or len(running) >= self._beside):
                return None
            self._waiting.remove(job)
            return job
        return None

    def _run(self, job: Job, gpu: str) -> None:
        folder = self._out / job.name
        environment = self._environment | {"OUT": str(folder.resolve()), "CUDA_VISIBLE_DEVICES": gpu}
        began, how = time.monotonic(), "not started"
        self._say(f"{job.name} begins on GPU {gpu}, {job.seconds:g} s at most")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "log.txt").open("wb") as log:
                process = subprocess.Popen(
                    ["bash", "-c", job.command],
                    cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
                self._processes[job.name] = process
                if self._stopped:
                    kill(process)
                try:
                    status = process.wait(timeout=job.seconds)
                    how = "ok" if status == 0 else f"exit {status}"
                except subprocess.TimeoutExpired:
                    how = f"killed after {job.seconds:g} s"
                if self._stopped:
                    how = "stopped"
                kill(process)
        except OSError as error:
            how = f"not started: {error}"
        finally:
            record = job.model_dump() | {"ended": how, "took": time.monotonic() - began, "gpu": gpu}
            try:
                (folder / "job.json").write_text(json.dumps(record | {"commit": self._commit}, indent=1) + "\n")
            except OSError as error:
                how = f"no record: {error}"
            with self._changed:
                self._running[gpu].remove(job)
                self._tell(job, how, f" after {time.monotonic() - began:.1f} s" if "after" not in how else "")
                self._changed.notify_all()

    def _tell(self, job: Job, how: str, more: str = "") -> None:
        self.ended[job.name] = how
        self._say(f"{job.name}: {how}{more}")

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:7.1f}] {text}", flush=True)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Ends a job and everything that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_jobs(path: Path) -> JobList:
    """A list, in its order; ends the program with 2 where it is none."""
    try:
        return JobList.model_validate(yaml.safe_load(path.read_text()))
    except (OSError, yaml.YAMLError, UnicodeDecodeError, RecursionError, ValidationError) as error:
        refuse(f"{path} is no list of jobs: {error}")


def chosen(jobs: Sequence[Job], only: Sequence[str], kinds: Sequence[str]) -> list[Job]:
    """The jobs of these names (in the order named) or kinds; ends the program with 2 for one that does not exist."""
    for names, known, what in (
        (only, [job.name for job in jobs], "job"),
        (kinds, sorted({job.kind for job in jobs}), "kind"),
    ):
        for name in names:
            if name not in known:
                close = nearest(name, known)
                refuse(f"there is no {what} {name}; " + (f"did you mean {close}?" if close else ", ".join(known)))
    by_name = {job.name: job for job in jobs}
    found = [by_name[name] for name in only] if only else list(jobs)
    return [job for job in found if not kinds or job.kind in kinds]


def how_ended(folder: Path) -> str:
    """What a job's record says: "ok" if well."""
    return str(record_of(folder).get("ended", "stopped from outside" if folder.is_dir() else "not run"))


def record_of(folder: Path) -> dict[str, Any]:
    """What a job says of itself when it has ended; empty if it has not."""
    try:
        record = json.loads((folder / "job.json").read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def written(job: Job, out: Path) -> dict[str, dict[str, Any]]:
    """Those of a job's files that are whole, by name."""
    found = {}
    for name in job.writes:
        try:
            content = json.loads((out / job.name / name).read_text())
        except (OSError, ValueError):
            continue
        if isinstance(content, dict):
            found[name] = content
    return found


def show(jobs: Sequence[Job], out: Path, ended: Mapping[str, str]) -> None:
    """A line for each job: how it ended, seconds, the files that belong into results/."""
    print(f"\n{'job':24} {'ended':26} {'seconds':>8}  files")
    for job in jobs:
        record = record_of(out / job.name)
        how = ended.get(job.name) or how_ended(out / job.name)
        files = ", ".join(written(job, out))
        took = f"{record['took']:8.1f}" if "took" in record else f"{'':8}"
        print(f"{job.name:24} {how.partition(':')[0]:26} {took}  {files}")


def collect(jobs: Sequence[Job], out: Path, target: Path) -> bool:
    """Copies the jobs' files into a folder; whether every one is there and of a job that ended well."""
    target.mkdir(parents=True, exist_ok=True)
    whole = True
    for job in jobs:
        how, files = how_ended(out / job.name), written(job, out)
        for name in job.writes:
            if name not in files:
                print(f"{name}: missing ({job.name}: {how})")
            elif how == "ok":
                shutil.copyfile(out / job.name / name, target / name)
                print(f"{name}: whole")
            else:
                cut = f"The job was cut ({how}): what is missing was not reached."
                content = files[name]
                content["note"] = " ".join(filter(None, (content.get("note"), cut)))
                (target / name).write_text(json.dumps(content, indent=1) + "\n")
                print(f"{name}: CUT ({how})")
            whole = whole and name in files and how == "ok"
    return whole


def refuse(text: str) -> NoReturn:
    """One message, exit status 2."""
    print(f"error: {text}", file=sys.stderr)
    raise SystemExit(2)


def refuse_missing_gpus(gpus: Sequence[str]) -> None:
    """Ends the program with 2 where a GPU is not there: every job would end in an error of its own."""
    import torch

    for gpu in gpus:
        if gpu.isdigit() and int(gpu) >= torch.cuda.device_count():
            refuse(f"there is no CUDA device {gpu}; torch finds {torch.cuda.device_count()}")


def seconds_of(jobs: Sequence[Job]) -> str:
    """Their limits, in words."""
    alone, beside = (sum(job.seconds for job in jobs if job.alone == way) for way in (True, False))
    return f"{alone:g} s of GPUs alone, {beside:g} s beside each other"


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="?", type=Path, default=JOBS, metavar="JOBS.yaml")
    parser.add_argument(
        "--out", type=Path, default=Path("measured"), metavar="DIR", help="folder of all jobs (default measured)"
    )
    parser.add_argument("--gpus", default="0", help="numbers of the GPUs to use (default 0)")
    parser.add_argument("--seconds", type=float, help="for everything")
    parser.add_argument("--beside", type=int, default=4, help="jobs beside each other on a GPU (default 4)")
    parser.add_argument("--only", default="", metavar="NAME,NAME", help="these jobs, in this order")
    parser.add_argument("--kind", default="", metavar="KIND,KIND")
    parser.add_argument("--dry-run", action="store_true", help="print what would run")
    parser.add_argument("--collect", type=Path, metavar="FOLDER", help="run nothing, copy files of jobs into a folder")
    options = parser.parse_args(arguments)
    names = [[name for name in text.split(",") if name] for text in (options.only, options.kind, options.gpus)]
    if not names[2] or options.beside < 1:
        refuse("--gpus needs a number at least, and --beside one job")
    listed = read_jobs(options.jobs)
    every = jobs = chosen(listed.jobs, names[0], names[1])
    if options.collect is not None:
        try:
            return int(not collect(jobs, options.out, options.collect))
        except OSError as error:
            refuse(f"{options.collect} cannot be written: {error}")
    jobs = list(every)
    left_out = {}
    for job in list(jobs):
        lacks = job.lacks()
        if how_ended(options.out / job.name) == "ok":
            print(f"{job.name}: has ended well already")
        elif lacks:
            left_out[job.name] = f"left out: no {', no '.join(lacks)} here"
            print(f"{job.name}: {left_out[job.name]}")
        else:
            continue
        jobs.remove(job)
    if options.dry_run:
        for job in jobs:
            way = " with the machine to itself" if job.quiet else " alone" if job.alone else ""
            print(f"{job.name}: {job.seconds:g} s{way}: {job.command.strip()}")
        for kind in dict.fromkeys(job.kind for job in jobs):
            print(f"{kind}: {seconds_of([job for job in jobs if job.kind == kind])}")
        print(f"in all: {seconds_of(jobs)}")
        return 0
    if listed.cuda:
        refuse_missing_gpus(names[2])
    try:
        measurement = Measurement(jobs, options.out, names[2], options.seconds, options.beside)
    except OSError as error:
        refuse(f"{options.out} cannot be written: {error}")
    try:
        # Jobs are in sessions of their own: whatever ends the program has to end them.
        with Signals() as signals:
            measurement.run()
    except KeyboardInterrupt:
        print("stopped; the same command goes on with the jobs that have not ended well", file=sys.stderr)
        return 128 + (signals.signal_number or signal.SIGINT)
    finally:
        ended = left_out | measurement.ended
        show(every, options.out, ended)
    return int(any(how != "ok" for how in ended.values()))


if __name__ == "__main__":
    raise SystemExit(main())

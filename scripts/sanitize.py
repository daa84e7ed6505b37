"""The package's kernels on small shapes under compute-sanitizer.

    python scripts/sanitize.py [--out results/sanitizer.json] [--tools memcheck,racecheck,synccheck] [--seconds 60]

Processes run side by side, one for each tool and part of the cases (`sanitize_cases.py`), and each runs this file as `--part`: memcheck over all of them, with
torch's allocator asking the driver for every tensor, so that a byte beyond one is seen; racecheck (shared memory) and synccheck (barriers) over the
CUDA C++ kernels. The kernels are compiled into the usual cache.

Controls (`sanitize_controls.py`) come first: kernels without a race whose order is made by mbarriers, as in decode and middle. If racecheck reports one of them, it
does not know that order, and what it reports of the kernels that the control speaks for says nothing; it is in the file all the same, and the file says which
controls were reported. Exit status 1: another error was found, or a tool did not come to its end.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sanitize_cases import CUDA_PARTS, PARTS, Case, launches  # noqa: E402
from sanitize_controls import CONTROLS, EXPLAINED, control  # noqa: E402

from benchmarks.stored import write_result  # noqa: E402

TOOLS = ("memcheck", "racecheck", "synccheck")


def parts_of(tool: str) -> tuple[str, ...]:
    """Those that a tool runs over."""
    return tuple(PARTS) if tool == "memcheck" else CUDA_PARTS


def cases_of(part: str) -> Iterator[Case]:
    """The cases of a process, controls first."""
    if part == CUDA_PARTS[0]:
        for name in CONTROLS:
            yield Case(name, partial(control, name), (name,))
    for cases in PARTS[part]:
        yield from cases()


def run_part(part: str) -> None:
    """In the tool's process: one line a case."""
    torch.manual_seed(0)
    for case in cases_of(part):
        began = time.monotonic()
        try:
            with launches() as launched:
                case.run()
            torch.cuda.synchronize()
            missing = set(case.kernels) - launched
            assert not missing, f"does not launch {', '.join(sorted(missing))}"
        except Exception as error:
            print(f"case failed: {case.name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            if "CUDA" in str(error) or "cu" in type(error).__name__.lower():
                raise SystemExit(1) from error
            continue
        print(f"case: {case.name} ({time.monotonic() - began:.1f} s)", flush=True)


def start(tool: str, part: str, seconds: float) -> subprocess.Popen[str]:
    """A tool over a part."""
    cases = [sys.executable, str(Path(__file__).resolve()), "--part", part]
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "40", "--target-processes", "application-only"]
    bounded = ["timeout", "-s", "KILL", f"{seconds:.0f}"]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return subprocess.Popen(
        [*bounded, *command, *cases], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def summary(outputs: list[tuple[str, int]]) -> dict[str, Any]:
    """What a tool said of all its parts: (output, exit status) of each."""
    text = "\n".join(output for output, _ in outputs)
    counts = [re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", output) for output, _ in outputs]
    cases = dict(re.findall(r"^case: (.*) \(([\d.]+) s\)$", text, re.M))
    errors = sum(int(found[1]) for found in counts if found)
    races = Counter(re.findall(r"Race reported between \w+ access at (\w+)", text))
    reported = [name for name in CONTROLS if races[name]]
    unknown = {*reported, *(kernel for name in reported for kernel in EXPLAINED[name])}
    said = [line for line in text.splitlines() if line.startswith("=========")][:60]
    return {
        "finished": all(counts) and not any(status for _, status in outputs),
        "errors": errors,
        "races": dict(races),
        "controls": {name: races[name] for name in CONTROLS if name in cases},
        "not_known": sum(races[name] for name in unknown),
        "cases": list(cases),
        "seconds": {name: float(seconds) for name, seconds in cases.items() if float(seconds) >= 1},
        "failed": re.findall(r"^case failed: (.*)$", text, re.M),
        "output": said if errors else [],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        run_part(arguments.part)
        return
    if not torch.cuda.is_available() or shutil.which("compute-sanitizer") is None:
        raise SystemExit("error: needs a CUDA device and compute-sanitizer, which comes with the CUDA toolkit")
    began = time.monotonic()
    running = {
        tool: [start(tool, part, arguments.seconds) for part in parts_of(tool)] for tool in arguments.tools.split(",")
    }
    results: dict[str, Any] = {}
    # All are read side by side: a process whose pipe is full would wait.
    with ThreadPoolExecutor(sum(map(len, running.values()))) as readers:
        reading = {tool: [readers.submit(ended, process) for process in all_of] for tool, all_of in running.items()}
        for tool, futures in reading.items():
            outputs = [future.result() for future in futures]
            found = results[tool] = summary(outputs)
            said = f"{found['errors']} errors ({found['not_known']} of barriers that the tool does not know)"
            print(f"{tool}: {said}, {len(found['cases'])} cases, failed: {found['failed']}", flush=True)
            print(f"controls that are reported: {found['controls']}", flush=True)
            print("\n".join(found["output"]))
            for output, status in outputs:
                if status or "SUMMARY" not in output:
                    print(output[-2000:])
            if arguments.out:
                write_result(arguments.out, seconds=time.monotonic() - began, tools=results)
    if any(
        not found["finished"] or found["errors"] > found["not_known"] or found["failed"] for found in results.values()
    ):
        raise SystemExit(1)


def ended(process: subprocess.Popen[str]) -> tuple[str, int]:
    """(what it said, its exit status), when it has ended."""
    output, _ = process.communicate()
    return output, process.returncode


if __name__ == "__main__":
    main()

"""The package's kernels on small shapes under compute-sanitizer.

    python scripts/sanitize.py [--out results/sanitizer.json] [--tools memcheck,racecheck,synccheck] [--seconds 60]

Processes run side by side, one for each tool and part of the cases (`sanitize_cases.py`), and each runs this file as `--part`: memcheck over all of them, with
torch's allocator asking the driver for every tensor, so that a byte beyond one is seen; racecheck (shared memory) and synccheck (barriers) over the
CUDA C++ kernels. The kernels are compiled into the usual cache.

racecheck runs over twins of decode and middle too (`sanitize_twins.py`), since it follows the barriers of these kernels poorly. What it reports of one
of them is a false report if the kernel's plain twin, in the same cases, has none, and if it does report the twin with a planted fault; both by the counts in the
file. Exit status 1: another error was found, a planted fault was not, a case failed, or a tool did not come to its end.
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sanitize_cases import CUDA_PARTS, PARTS, Case, launches  # noqa: E402
from sanitize_twins import KERNELS, instead  # noqa: E402

from benchmarks.stored import write_result  # noqa: E402

TOOLS = ("memcheck", "racecheck", "synccheck")


def parts_of(tool: str) -> tuple[tuple[str, str], ...]:
    """(part, twin or nothing) of each process of a tool. One part has room for every planted fault."""
    shipped = tuple((part, "") for part in (PARTS if tool == "memcheck" else CUDA_PARTS))
    twins = (*((part, "plain") for part in CUDA_PARTS), (CUDA_PARTS[0], "fault"))
    return (*shipped, *twins) if tool == "racecheck" else shipped


def run_part(part: str, twin: str) -> None:
    """In the tool's process: one line a case. Of twins, the cases of the kernels that have them."""
    torch.manual_seed(0)
    every = (case for cases in PARTS[part] for case in cases())
    with instead(twin) if twin else nullcontext():
        for case in every:
            if not twin or set(case.kernels) & set(KERNELS):
                run_case(case, twin)


def run_case(case: Case, twin: str) -> None:
    """Runs one and says so."""
    began = time.monotonic()
    name = f"{twin} {case.name}" if twin else case.name
    try:
        with launches() as launched:
            case.run()
        torch.cuda.synchronize()
        missing = {f"{kernel}_{twin}" if twin else kernel for kernel in case.kernels} - launched
        assert not missing, f"does not launch {', '.join(sorted(missing))}"
    except Exception as error:
        print(f"case failed: {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        if "CUDA" in str(error) or "cu" in type(error).__name__.lower():
            raise SystemExit(1) from error
        return
    print(f"case: {name} ({time.monotonic() - began:.1f} s)", flush=True)


def start(tool: str, part: str, twin: str, seconds: float) -> subprocess.Popen[str]:
    """A tool over a part."""
    cases = [sys.executable, str(Path(__file__).resolve()), "--part", part, "--twin", twin]
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "1000", "--target-processes", "application-only"]
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
    counted = {twin: {name: races[f"{name}_{twin}"] for name in KERNELS} for twin in ("plain", "fault")}
    false = [name for name in KERNELS if not counted["plain"][name] and counted["fault"][name]]
    said = [line for line in text.splitlines() if line.startswith("=========")][:200]
    return {
        "finished": all(counts) and not any(status for _, status in outputs),
        "errors": errors,
        "races": dict(races),
        "twins": counted if any(case.startswith("plain ") for case in cases) else {},
        "planted": sum(counted["fault"].values()),
        "false": sum(races[name] for name in false),
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
    parser.add_argument("--twin", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        run_part(arguments.part, arguments.twin)
        return
    if not torch.cuda.is_available() or shutil.which("compute-sanitizer") is None:
        raise SystemExit("error: needs a CUDA device and compute-sanitizer, which comes with the CUDA toolkit")
    began = time.monotonic()
    running = {
        tool: [start(tool, part, twin, arguments.seconds) for part, twin in parts_of(tool)]
        for tool in arguments.tools.split(",")
    }
    results: dict[str, Any] = {}
    # All are read side by side: a process whose pipe is full would wait.
    with ThreadPoolExecutor(sum(map(len, running.values()))) as readers:
        reading = {tool: [readers.submit(ended, process) for process in all_of] for tool, all_of in running.items()}
        for tool, futures in reading.items():
            outputs = [future.result() for future in futures]
            found = results[tool] = summary(outputs)
            said = f"{found['errors']} errors, {found['planted']} of them planted and {found['false']} false"
            print(f"{tool}: {said}, {len(found['cases'])} cases, failed: {found['failed']}", flush=True)
            print(f"reports of twins: {found['twins']}", flush=True)
            print("\n".join(found["output"]))
            for output, status in outputs:
                if status or "SUMMARY" not in output:
                    print(output[-2000:])
            if arguments.out:
                write_result(arguments.out, sanitizer=version(), seconds=time.monotonic() - began, tools=results)
    if not all(map(passed, results.values())):
        raise SystemExit(1)


def passed(found: dict[str, Any]) -> bool:
    """Whether a tool came to its end, saw what was planted, and said nothing else that is true."""
    seen = all(found["twins"].get("fault", {}).values())
    true = found["errors"] - found["planted"] - found["false"]
    return found["finished"] and seen and true == 0 and not found["failed"]


def version() -> str:
    """What the tool calls itself."""
    said = subprocess.run(["compute-sanitizer", "--version"], capture_output=True, text=True, check=False).stdout
    return next((line.strip() for line in said.splitlines() if line.startswith("Version")), "unknown")


def ended(process: subprocess.Popen[str]) -> tuple[str, int]:
    """(what it said, its exit status), when it has ended."""
    output, _ = process.communicate()
    return output, process.returncode


if __name__ == "__main__":
    main()

"""The package's kernels on small shapes under compute-sanitizer.

    python scripts/sanitize.py [--out results/sanitizer.json] [--tools memcheck,racecheck,synccheck] [--seconds 60] [--code FOLDER] [--judge FILE]

Processes run side by side, one for each tool and part of the cases (`sanitize_cases.py`), and each runs this file as `--part`: memcheck over all of them, with
torch's allocator asking the driver for every tensor, so that a byte beyond one is seen; racecheck (shared memory) and synccheck (barriers) over the
CUDA C++ kernels, which are compiled into a folder of the run (`--code`, or one that is deleted).

racecheck makes false reports of kernels with mbarriers, clusters and named barriers. A report is one of these:

* `planted`: of a twin with a planted fault (`sanitize_twins.py`), which must be reported;
* `ordered`: in the machine code that ran, a barrier of the whole block stands between both accesses on every way (`sanitize_code.py`), so it is false;
* `twin`: the kernel's plain twin, in the same cases, has no report, and its planted fault has: so it is false;
* `true`: all else, and every error of the other tools.

Exit status 1: one is true, a planted fault was not reported, a case failed, or a tool did not come to its end. `--judge FILE --code FOLDER` judges the reports
of a file again, with the machine code in a folder.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sanitize_cases import CUDA_PARTS, PARTS, Case, launches  # noqa: E402
from sanitize_code import Code, code_of  # noqa: E402
from sanitize_twins import KERNELS, instead  # noqa: E402

from benchmarks.stored import write_result  # noqa: E402

TOOLS = ("memcheck", "racecheck", "synccheck")
VERDICTS = ("planted", "ordered", "twin", "true")


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


def start(tool: str, part: str, twin: str, seconds: float, code: Path) -> subprocess.Popen[str]:
    """A tool over a part."""
    cases = [sys.executable, str(Path(__file__).resolve()), "--part", part, "--twin", twin]
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "1000", "--target-processes", "application-only"]
    bounded = ["timeout", "-s", "KILL", f"{seconds:.0f}"]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "QERL_CACHE": str(code)}
    return subprocess.Popen(
        [*bounded, *command, *cases], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def summary(outputs: list[tuple[str, int]]) -> dict[str, Any]:
    """What a tool said of all its parts: (output, exit status) of each."""
    text = "\n".join(output for output, _ in outputs)
    counts = [re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", output) for output, _ in outputs]
    cases = dict(re.findall(r"^case: (.*) \(([\d.]+) s\)$", text, re.M))
    errors = sum(int(found[1]) for found in counts if found)
    said = [line for line in text.splitlines() if line.startswith("=========")][:400]
    return {
        "finished": all(counts) and not any(status for _, status in outputs),
        "errors": errors,
        "cases": list(cases),
        "seconds": {name: float(seconds) for name, seconds in cases.items() if float(seconds) >= 1},
        "failed": re.findall(r"^case failed: (.*)$", text, re.M),
        "output": said if errors else [],
    }


def judged(found: dict[str, Any], code: Path) -> dict[str, Any]:
    """A tool's summary with its reports and the verdict on each; `code` holds the machine code that ran."""
    reports = reports_of(found["output"])
    with ThreadPoolExecutor(os.cpu_count()) as readers:  # a third of a second each
        list(readers.map(cached_code, {cubin for report in reports for cubin in cubins_of(report, code)}))
    ordered = [is_ordered(report, code) for report in reports]
    functions = list(map(function_of, reports))
    # A fault that the rule of machine code excuses counts as not found.
    seen = {name for name, excused in zip(functions, ordered, strict=True) if not excused}

    def verdict(function: str, excused: bool) -> str:
        if excused:
            return "ordered"
        if function.endswith("_fault"):
            return "planted"
        return "twin" if f"{function}_fault" in seen and f"{function}_plain" not in functions else "true"

    verdicts = list(map(verdict, functions, ordered))
    counted = Counter(verdicts)
    counted["true"] = found["errors"] - sum(counted[name] for name in VERDICTS[:-1])
    has_twins = any(case.startswith("fault ") for case in found["cases"])
    return {
        **{key: found[key] for key in ("finished", "errors", "cases", "seconds", "failed", "output")},
        "verdicts": {name: counted[name] for name in VERDICTS},
        "faults_found": {name: f"{name}_fault" in seen for name in KERNELS} if has_twins else {},
        "reports": [f"{word}: {'; '.join(report)}" for word, report in zip(verdicts, reports, strict=True)],
    }


def reports_of(lines: list[str]) -> list[list[str]]:
    """The accesses of every report of a race, each as `Write decode+0x6df0`."""
    reports: list[list[str]] = []
    for line in lines:
        if found := re.search(r"(Race reported between|and) (Write|Read) access at (\w+\+0x[0-9a-f]+)", line):
            if found[1] != "and":
                reports.append([])
            reports[-1].append(f"{found[2]} {found[3]}")
    return reports


def function_of(report: list[str]) -> str:
    """The kernel that a report is of."""
    return report[0].split(" ")[1].split("+")[0]


def cubins_of(report: list[str], code: Path) -> list[Path]:
    """All machine code of the kernel that a report is of."""
    return sorted((code / "kernels").glob(f"{function_of(report)}-*.cubin"))


def is_ordered(report: list[str], code: Path) -> bool:
    """Whether a barrier of the block stands between the first access and each other, in all machine code that has these accesses."""
    accesses = [(access.split(" ")[0], int(access.split("+")[1], 16)) for access in report]
    found = [
        kernel
        for cubin in cubins_of(report, code)
        if all((kernel := cached_code(cubin)).has(*access) for access in accesses)
    ]
    first, *others = (offset for _, offset in accesses)
    return bool(found) and all(kernel.ordered(first, other) for kernel in found for other in others)


@cache
def cached_code(cubin: Path) -> Code:
    """`code_of`, once."""
    return code_of(cubin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--code", type=Path, help="folder of the machine code, which is kept")
    parser.add_argument("--judge", type=Path, help="a result file whose reports are judged again")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--twin", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.judge:
        if arguments.code is None:
            parser.error("--judge needs --code: the machine code that ran")
        judge_again(arguments.judge, arguments.code, arguments.out)
        return
    if arguments.part:
        run_part(arguments.part, arguments.twin)
        return
    if not torch.cuda.is_available() or shutil.which("compute-sanitizer") is None:
        raise SystemExit("error: needs a CUDA device and compute-sanitizer, which comes with the CUDA toolkit")
    with tempfile.TemporaryDirectory() as temporary:
        results = run(arguments, arguments.code or Path(temporary))
    if not all(map(passed, results.values())):
        raise SystemExit(1)


def judge_again(file: Path, code: Path, out: Path | None) -> None:
    """The reports of a result file, judged by the rules of now."""
    result = json.loads(file.read_text(encoding="utf-8"))
    result["tools"] = {tool: judged(found, code) for tool, found in result["tools"].items()}
    for tool, found in result["tools"].items():
        tell(tool, found)
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if not all(map(passed, result["tools"].values())):
        raise SystemExit(1)


def run(arguments: argparse.Namespace, code: Path) -> dict[str, Any]:
    """Every tool over its parts; what each said."""
    began = time.monotonic()
    running = {
        tool: [start(tool, part, twin, arguments.seconds, code) for part, twin in parts_of(tool)]
        for tool in arguments.tools.split(",")
    }
    results: dict[str, Any] = {}
    # All are read side by side: a process whose pipe is full would wait.
    with ThreadPoolExecutor(sum(map(len, running.values()))) as readers:
        reading = {tool: [readers.submit(ended, process) for process in all_of] for tool, all_of in running.items()}
        for tool, futures in reading.items():
            outputs = [future.result() for future in futures]
            results[tool] = judged(summary(outputs), code)
            tell(tool, results[tool])
            for output, status in outputs:
                if status or "SUMMARY" not in output:
                    print(output[-2000:])
            if arguments.out:
                seconds = time.monotonic() - began
                write_result(arguments.out, sanitizer=version(), seconds=seconds, tools=results)
    return results


def tell(tool: str, found: dict[str, Any]) -> None:
    """Prints what a tool found."""
    counted = ", ".join(f"{count} {name}" for name, count in found["verdicts"].items())
    print(f"{tool}: {found['errors']} errors ({counted}), {len(found['cases'])} cases, failed: {found['failed']}")
    print("\n".join(found["reports"] or found["output"]), flush=True)


def passed(found: dict[str, Any]) -> bool:
    """Whether a tool came to its end, saw what was planted, and said nothing that is true."""
    return (
        found["finished"]
        and all(found["faults_found"].values())
        and not found["verdicts"]["true"]
        and not found["failed"]
    )


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

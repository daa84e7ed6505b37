"""What `scripts/sanitize.py` runs under compute-sanitizer: every kernel of the package, and controls that compile; and how it counts."""

import ast
import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton_cpu  # noqa: F401 - prepares the interpreter, before any kernel module
from triton.runtime.interpreter import InterpretedFunction

import qerl.kernels
from qerl.kernels import dispatch
from qerl.kernels.cuda import compile_cuda
from qerl.kernels.cuda.compiler import has_compiler
from qerl.kernels.fp4_linear import kept

PACKAGE = Path(qerl.kernels.__file__).parent
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def script(name: str):
    before = list(sys.path)
    sys.path.insert(0, str(SCRIPTS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path[:] = before


CASES, CONTROLS, SANITIZE = (script(name) for name in ("sanitize_cases", "sanitize_controls", "sanitize"))


def is_jit(decorator: ast.expr) -> bool:
    return ast.unparse(decorator).startswith("triton.jit")


def triton_kernels() -> set[str]:
    """Functions under `triton.jit` that no other such function calls; what these call is part of them."""
    found, called = set(), set()
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        home = {
            alias.asname or alias.name: f"{CASES.short(node.module)}.{alias.name}"
            for node in tree.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and any(map(is_jit, node.decorator_list)):
                found.add(f"{module}.{node.name}")
                names = [call.func.id for call in ast.walk(node) if is_plain_call(call)]
                called |= {home.get(name, f"{module}.{name}") for name in names}
    return found - called


def is_plain_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


def cuda_kernels() -> set[str]:
    text = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.cu*"))
    return set(re.findall(r'extern "C" __global__ void(?: __launch_bounds__\(.*?\))? (\w+)\(const', text)) | set(
        re.findall(r'extern "C" __global__ void (\w+)\(\)', text)
    )


@pytest.fixture
def on_the_cpu(monkeypatch):
    """The Triton implementations are taken, and their launches noted and left out."""
    monkeypatch.setattr(
        dispatch,
        "load",
        lambda op, device, wanted="auto": importlib.import_module(dispatch._IMPLEMENTATIONS[op][0].module),
    )
    counters = torch.zeros(1 << 14, dtype=torch.int32)
    monkeypatch.setattr(kept, "workspace", lambda device: SimpleNamespace(counters=lambda: counters))
    monkeypatch.setattr(InterpretedFunction, "run", lambda *arguments, **options: None)


@pytest.mark.interpret
def test_every_kernel_of_the_package_is_launched_by_a_case(on_the_cpu):
    named = set()
    for case in CASES.triton_cases("cpu"):
        with CASES.launches() as launched:
            case.run()
        assert set(case.kernels) <= launched, case.name
        named |= set(case.kernels)
    # Cases of linear layers and packed heads need a device; they name theirs in the source.
    source = (SCRIPTS / "sanitize_cases.py").read_text(encoding="utf-8")
    named |= {name for name in cuda_kernels() | triton_kernels() if f'"{name}"' in source}
    kernels = triton_kernels() | cuda_kernels()
    assert len(kernels) >= 29 and {"decode", "middle", "cached_attention.contexts.attend_together"} <= kernels
    assert kernels - named == set(), "no case, and no reason in NO_CASE"
    assert set(CASES.NO_CASE) <= kernels


def test_the_memory_checker_runs_over_all_parts_and_the_others_over_the_cuda_kernels():
    assert set(SANITIZE.parts_of("memcheck")) == set(CASES.PARTS) > set(SANITIZE.parts_of("racecheck"))
    assert set(SANITIZE.parts_of("racecheck")) == set(CASES.CUDA_PARTS) <= set(CASES.PARTS)


@pytest.mark.skipif(not has_compiler(), reason="needs NVRTC or nvcc")
@pytest.mark.parametrize("name", CONTROLS.CONTROLS)
def test_controls_compile(name):
    """Into the user's cache: only a change is compiled again."""
    code = compile_cuda(CONTROLS.source_of(name), name=name, arch="sm_90a", defines=CONTROLS.CONTROLS[name])
    assert code[:4] == b"\x7fELF" and name.encode() in code


RACE = "========= Error: Race reported between Write access at {name}+0x6df0\n"


def output(*reported, errors=None, cases=("control_of_sums", "control_of_a_warp", "decode nvfp4, 1 rows")):
    text = "".join(f"case: {case} (1.5 s)\n" for case in cases) + "".join(RACE.format(name=name) for name in reported)
    count = len(reported) if errors is None else errors
    return text + f"========= RACECHECK SUMMARY: {count} hazards displayed ({count} errors, 0 warnings)\n"


def test_reports_of_a_kernel_count_unless_its_own_control_is_reported():
    found = SANITIZE.summary([(output("decode", "decode"), 0), (output("middle"), 0)])
    assert (found["errors"], found["not_known"], found["races"]) == (3, 0, {"decode": 2, "middle": 1})
    assert found["controls"] == {"control_of_a_warp": 0, "control_of_sums": 0}
    found = SANITIZE.summary([(output("decode", "control_of_sums", "middle"), 0)])
    assert (found["errors"], found["not_known"]) == (3, 2), "the control's own report and decode's"
    assert found["controls"] == {"control_of_a_warp": 0, "control_of_sums": 1}
    found = SANITIZE.summary([(output("middle", "control_of_a_warp"), 0)])
    assert (found["errors"], found["not_known"]) == (2, 2)


def test_a_part_that_was_killed_or_says_nothing_is_not_finished():
    whole = output()
    assert SANITIZE.summary([(whole, 0), (whole, 0)])["finished"]
    assert not SANITIZE.summary([(whole, 0), ("case: decode nvfp4, 1 rows (1.0 s)\n", 137)])["finished"]
    assert not SANITIZE.summary([(whole, 1)])["finished"]
    failed = SANITIZE.summary([("case failed: shrink: AssertionError: does not launch shrink\n" + whole, 0)])
    assert failed["failed"] == ["shrink: AssertionError: does not launch shrink"]
    assert failed["seconds"]["decode nvfp4, 1 rows"] == 1.5

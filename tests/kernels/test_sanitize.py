"""What `scripts/sanitize.py` runs under compute-sanitizer: every kernel of the package, and twins that compile; and how it counts."""

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
from qerl.kernels.fp4_linear import geometry, kept, middle
from qerl.kernels.fp4_linear.tiled import TILED

PACKAGE = Path(qerl.kernels.__file__).parent
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def script(name: str):
    before = list(sys.path)
    sys.path.insert(0, str(SCRIPTS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path[:] = before


CASES, TWINS, SANITIZE = (script(name) for name in ("sanitize_cases", "sanitize_twins", "sanitize"))


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


def test_every_tool_runs_over_its_parts_and_racecheck_over_twins_of_them():
    shipped, cuda = {(part, "") for part in CASES.PARTS}, {(part, "") for part in CASES.CUDA_PARTS}
    assert set(SANITIZE.parts_of("memcheck")) == shipped > cuda
    assert set(SANITIZE.parts_of("synccheck")) == cuda
    twins = set(SANITIZE.parts_of("racecheck")) - cuda
    assert {part for part, twin in twins if twin == "plain"} == set(CASES.CUDA_PARTS)
    assert {twin for _, twin in twins} == set(TWINS.CHANGES)


_SHAPE = middle.Shape(tokens=32, tiles=1, blocks=4, stages=4)
SMALL = {
    "decode": (
        {**TILED["nvfp4"].macros(256), "NT": 1, "WARPS": geometry.warps(1), "CLUSTER": 4, "STAGES": 8, "VECTORS": 1},
        "",
    ),
    "middle": (middle.macros(_SHAPE), middle.wgmma_source(32)),
}
"""Macros of a small kernel, and what its source has besides."""


@pytest.mark.skipif(not has_compiler(), reason="needs NVRTC or nvcc")
@pytest.mark.parametrize("twin", TWINS.CHANGES)
@pytest.mark.parametrize("name", TWINS.KERNELS)
def test_twins_compile(name, twin):
    """Into the user's cache: only a change is compiled again."""
    defines, extra = SMALL[name]
    source = TWINS.source_of(name, twin, extra)
    code = compile_cuda(source, name=f"{name}_{twin}", arch="sm_90a", defines=defines)
    assert code[:4] == b"\x7fELF" and f"{name}_{twin}".encode() in code


RACE = "========= Error: Race reported between Write access at {name}+0x6df0\n"


def output(*reported, errors=None, cases=("decode nvfp4, 1 rows", "plain decode nvfp4, 1 rows")):
    text = "".join(f"case: {case} (1.5 s)\n" for case in cases) + "".join(RACE.format(name=name) for name in reported)
    count = len(reported) if errors is None else errors
    return text + f"========= RACECHECK SUMMARY: {count} hazards displayed ({count} errors, 0 warnings)\n"


PLANTED = ("decode_fault", "middle_fault", "middle_fault")


def judged(*reported):
    found = SANITIZE.summary([(output(*reported), 0), (output(*PLANTED), 0)])
    return found["errors"] - found["planted"], found["false"], SANITIZE.passed(found)


def test_a_report_is_false_if_the_plain_twin_has_none():
    assert judged() == (0, 0, True)
    assert judged("decode", "decode", "middle") == (3, 3, True)
    assert judged("decode", "middle", "middle_plain") == (3, 1, False), "middle's are true, and the twin's"
    assert judged("decode_plain") == (1, 0, False)
    assert judged("shrink", "decode") == (2, 1, False), "a kernel without twins"


def test_a_planted_fault_that_is_not_reported_takes_the_tool_its_word():
    found = SANITIZE.summary([(output("decode", "decode_fault"), 0)])
    assert found["twins"] == {"plain": {"decode": 0, "middle": 0}, "fault": {"decode": 1, "middle": 0}}
    assert found["false"] == 1 and not SANITIZE.passed(found)
    found = SANITIZE.summary([(output("middle", "decode_fault"), 0)])
    assert found["false"] == 0


def test_a_part_that_was_killed_or_says_nothing_is_not_finished():
    whole = output(cases=("decode nvfp4, 1 rows",))
    assert SANITIZE.passed(SANITIZE.summary([(whole, 0), (whole, 0)])), "a tool without twins"
    assert not SANITIZE.passed(SANITIZE.summary([(whole, 0), ("case: decode nvfp4, 1 rows (1.0 s)\n", 137)]))
    assert not SANITIZE.passed(SANITIZE.summary([(whole, 1)]))
    failed = SANITIZE.summary([("case failed: shrink: AssertionError: does not launch shrink\n" + whole, 0)])
    assert failed["failed"] == ["shrink: AssertionError: does not launch shrink"] and not SANITIZE.passed(failed)
    assert failed["seconds"]["decode nvfp4, 1 rows"] == 1.5

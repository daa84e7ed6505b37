"""What `scripts/sanitize.py` runs under compute-sanitizer: every kernel of the package, and twins that compile; and how it counts."""

import ast
import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton_cpu  # noqa: F401 - prepares the interpreter, before any kernel module
from pretended import pretend
from triton.runtime.interpreter import InterpretedFunction

import qerl.kernels
from qerl.formats.tiles import TiledFormat
from qerl.kernels import dispatch
from qerl.kernels.cuda import Kernel, TensorMap, compile_cuda
from qerl.kernels.cuda.compiler import has_compiler
from qerl.kernels.fp4_linear import decode, dense, geometry, kept, middle, regimes
from qerl.kernels.fp4_linear import shrink as shrinking
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


CASES, CODE, TWINS, SANITIZE = (
    script(name) for name in ("sanitize_cases", "sanitize_code", "sanitize_twins", "sanitize")
)


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


@pytest.fixture
def on_a_pretended_h200(on_the_cpu, monkeypatch):
    """CUDA C++ kernels are chosen as on an H200, and their launches noted and left out."""

    def compiled(device, name, defines=(), extra=""):
        kernel = object.__new__(Kernel)
        kernel._name = name
        return kernel

    space, counters = pretend(monkeypatch), torch.zeros(1 << 15, dtype=torch.int32)
    space.counters = lambda: counters
    space.sums = lambda numbers: torch.empty(numbers)
    space.scratch = lambda rows, columns: torch.empty(rows, columns, dtype=torch.bfloat16)
    for module in (decode, dense, middle, shrinking):
        monkeypatch.setattr(module, "compiled", compiled)
    monkeypatch.setattr(middle, "tensor_map", lambda *arguments, **options: TensorMap())
    monkeypatch.setattr(Kernel, "launch", lambda *arguments: None)
    monkeypatch.setattr(TiledFormat, "for_device", TiledFormat.tiled)
    inputs = CASES.Inputs
    monkeypatch.setattr(CASES, "Inputs", lambda device: inputs("cpu"))


def test_cases_of_cuda_kernels_launch_what_they_name_as_the_dispatch_chooses(on_a_pretended_h200):
    """Where the dispatch moves a number of rows to another kernel, the cases move with it, or this fails."""
    of_devices = (CASES.kept_cases, CASES.head_cases)
    every = [
        *CASES.linear_cases(CASES.FORMATS),
        *CASES.fp8_cases(),
        *(case for cases in of_devices for case in cases("cuda") if set(case.kernels) & cuda_kernels()),
    ]
    named = set()
    for case in every:
        with CASES.launches() as launched:
            case.run()
        assert set(case.kernels) <= launched, case.name
        named |= set(case.kernels)
    assert named >= cuda_kernels() - set(CASES.NO_CASE)
    names = [case.name for case in every]
    for name in CASES.FORMATS:
        assert {f"decode {name}, {rows} rows" for rows in (1, regimes.few_rows(name))} <= set(names)
    assert len(set(names)) == len(names)


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


def output(*reported, cases=("decode nvfp4, 1 rows",)):
    """What racecheck prints; a report is a function, whose store at 0x10 meets its load at 0x20, or the function and these two offsets."""
    text = "".join(f"case: {case} (1.5 s)\n" for case in cases)
    for name in reported:
        name, store, load = name if isinstance(name, tuple) else (name, 0x10, 0x20)
        text += f"========= Error: Race reported between Write access at {name}+{store:#x}\n"
        text += f"=========     and Read access at {name}+{load:#x} [64 hazards]\n========= \n"
    count = len(reported)
    return text + f"========= RACECHECK SUMMARY: {count} hazards displayed ({count} errors, 0 warnings)\n"


PLANTED = output("decode_fault", "middle_fault", "middle_fault", cases=("fault decode nvfp4, 1 rows",))


def judged(tmp_path, *reported):
    found = SANITIZE.judged(SANITIZE.summary([(output(*reported), 0), (PLANTED, 0)]), tmp_path)
    return found["verdicts"], SANITIZE.passed(found)


def verdicts(planted=3, ordered=0, twin=0, true=0):
    return {"planted": planted, "ordered": ordered, "twin": twin, "true": true}


def test_a_report_is_false_if_the_plain_twin_has_none(tmp_path):
    assert judged(tmp_path) == (verdicts(), True)
    assert judged(tmp_path, "decode", "decode", "middle") == (verdicts(twin=3), True)
    assert judged(tmp_path, "decode", "middle", "middle_plain") == (verdicts(twin=1, true=2), False)
    assert judged(tmp_path, "shrink", "decode") == (verdicts(twin=1, true=1), False), "a kernel without twins"


def test_a_planted_fault_that_is_not_reported_takes_the_tool_its_word(tmp_path):
    text = output("decode", "middle", "decode_fault", cases=("fault decode nvfp4, 1 rows",))
    found = SANITIZE.judged(SANITIZE.summary([(text, 0)]), tmp_path)
    assert found["verdicts"] == verdicts(planted=1, twin=1, true=1)
    assert found["faults_found"] == {"decode": True, "middle": False}
    found = SANITIZE.judged(SANITIZE.summary([(output(cases=("fault decode nvfp4, 1 rows",)), 0)]), tmp_path)
    assert found["errors"] == 0 and not SANITIZE.passed(found)


def test_errors_that_are_no_races_are_true(tmp_path):
    text = "========= Invalid __global__ read of size 4 bytes\n========= ERROR SUMMARY: 2 errors\n"
    found = SANITIZE.judged(SANITIZE.summary([(text, 0)]), tmp_path)
    assert found["verdicts"] == verdicts(planted=0, true=2) and not SANITIZE.passed(found)


def test_a_part_that_was_killed_or_says_nothing_is_not_finished(tmp_path):
    def passed(*outputs):
        return SANITIZE.passed(SANITIZE.judged(SANITIZE.summary(list(outputs)), tmp_path))

    whole = output()
    assert passed((whole, 0), (whole, 0)), "a tool without twins"
    assert not passed((whole, 0), ("case: decode nvfp4, 1 rows (1.0 s)\n", 137))
    assert not passed((whole, 1))
    text = "case failed: shrink: AssertionError: does not launch shrink\n" + whole
    failed = SANITIZE.summary([(text, 0)])
    assert failed["failed"] == ["shrink: AssertionError: does not launch shrink"] and not passed((text, 0))
    assert failed["seconds"]["decode nvfp4, 1 rows"] == 1.5


STEPS = """
extern "C" __global__ void NAME(const __grid_constant__ Parameters p) {
  __shared__ int values[128];
  volatile int* shared = values;
  int sum = 0;
#pragma unroll 1
  for (int round = 0; round < p.rounds; ++round) {
    if (threadIdx.x >= p.writers) shared[threadIdx.x & 127] = round;
    MIDDLE;
    if (threadIdx.x < p.writers) sum += shared[127 - threadIdx.x];
    END;
  }
  p.out[threadIdx.x] = sum;
}
"""
PARAMETERS = "struct Parameters { int* out; int rounds, writers; };"
BARRIERS = {
    # name: (behind the store, behind the load, whether both are ordered)
    "both": ("__syncthreads()", "__syncthreads()", True),
    "cluster": (
        "__syncthreads()",
        'asm volatile("barrier.cluster.arrive.aligned;barrier.cluster.wait.aligned;" ::: "memory")',
        True,
    ),
    "next_round": ("__syncthreads()", "", False),
    "none": ("", "__syncthreads()", False),
    "some_threads": ('asm volatile("bar.sync 1, 128;" ::: "memory")', "__syncthreads()", False),
    "some_ways": ("if (p.writers > 64) __syncthreads()", "__syncthreads()", False),
    "arrival": ('asm volatile("bar.arrive 0, 256;" ::: "memory")', "__syncthreads()", False),
}


@pytest.mark.skipif(not has_compiler() or CODE.disassembler() is None, reason="needs a compiler and nvdisasm")
@pytest.mark.parametrize("name", BARRIERS)
def test_order_is_found_where_a_barrier_stands_on_every_way(name, tmp_path):
    middle, end, ordered = BARRIERS[name]
    source = PARAMETERS + STEPS.replace("MIDDLE", middle).replace("END", end).replace("NAME", f"steps_{name}")
    (tmp_path / "kernels").mkdir()
    cubin = tmp_path / "kernels" / f"steps_{name}-sm_90a-0.cubin"
    cubin.write_bytes(compile_cuda(source, name=f"steps_{name}", arch="sm_90a"))
    code = CODE.code_of(cubin)
    (store,) = (line.offset for line in code.lines if code.has("Write", line.offset))
    loads = [line.offset for line in code.lines if code.has("Read", line.offset)]
    assert loads and all(code.ordered(store, load) == ordered == code.ordered(load, store) for load in loads)
    # As a report: only of the function, and only if the file has both accesses.
    text = output(
        (f"steps_{name}", store, loads[0]), (f"steps_{name}", store, store), (f"step_{name}", store, loads[0])
    )
    found = SANITIZE.judged(SANITIZE.summary([(text, 0)]), tmp_path)
    assert [report.split(":")[0] for report in found["reports"]] == ["ordered" if ordered else "true", "true", "true"]


def test_a_file_is_judged_again(tmp_path, capsys):
    found = SANITIZE.summary([(output("decode"), 0), (PLANTED, 0)])
    file, out = tmp_path / "before.json", tmp_path / "after.json"
    file.write_text(json.dumps({"command": "kept", "tools": {"racecheck": found | {"stale": 1}}}))
    SANITIZE.judge_again(file, tmp_path, out)
    after = json.loads(out.read_text())
    assert after == {"command": "kept", "tools": {"racecheck": SANITIZE.judged(found, tmp_path)}}
    assert "4 errors (3 planted, 0 ordered, 1 twin, 0 true)" in capsys.readouterr().out
    file.write_text(json.dumps({"tools": {"racecheck": SANITIZE.summary([(output("shrink"), 0)])}}))
    with pytest.raises(SystemExit):
        SANITIZE.judge_again(file, tmp_path, None)

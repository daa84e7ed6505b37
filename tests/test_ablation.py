"""The benchmark of kernels with parts left out: its sources, the order and the room of its cells, and what becomes of processes that do not end."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import ablation, ablation_worker
from benchmarks.ablation import Ablation, all_cells
from benchmarks.ablation_parts import AGAIN, ALL, PARTS, Edit, Part, patched_source
from benchmarks.ablation_worker import PRODUCTS, Cell, Plan
from qerl.kernels.cuda import compiler
from qerl.kernels.fp4_linear import decode, fp4_linear, middle
from qerl.kernels.fp4_linear.geometry import decode_geometry
from qerl.kernels.fp4_linear.middle_shape import choose
from qerl.kernels.fp4_linear.workspace import Code, source_files, whole_source

EVERY = [(kernel, part) for kernel, both in PARTS.items() for parts in both for part in parts]


@pytest.mark.parametrize(("kernel", "part"), EVERY, ids=[f"{kernel}: {part.name}" for kernel, part in EVERY])
def test_what_is_left_out_is_a_text_that_the_sources_have_once(kernel, part):
    """A kernel that changes brings its ablation with it."""
    whole, edited = whole_source(kernel, "// extra\n"), patched_source(kernel, part.edits, "// extra\n")
    assert (edited == whole) == (not part.edits)
    assert edited.count("{") - edited.count("}") == whole.count("{") - whole.count("}")
    assert not any("ablat" in text.lower() for text in source_files(kernel).values())


def test_a_text_that_is_not_there_once_is_refused():
    for edit in (Edit("decode.cu", "no such text", ""), Edit("decode.cu", "{", ""), Edit("middle.cu", "{", "")):
        with pytest.raises(ValueError, match=rf"decode: {edit.file} has \d+ times what an ablation replaces once"):
            patched_source("decode", [edit])


def test_parts_of_a_kernel_have_names_of_their_own():
    for kernel, both in PARTS.items():
        names = [part.name for parts in both for part in parts]
        assert len({*names, AGAIN}) == len(names) + 1
        assert both[0][0] == Part(ALL) and not any(part.adapters for part in both[0]), kernel
        assert all(part.adapters for part in both[1]) and not both[1][0].edits, kernel


def sass(code: bytes, folder: Path) -> str:
    triton = pytest.importorskip("triton")
    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not program.exists():
        pytest.skip("the disassembler comes with Triton for CUDA")
    (folder / "kernel.cubin").write_bytes(code)
    return subprocess.run(
        [program, "-sass", folder / "kernel.cubin"], capture_output=True, text=True, check=True
    ).stdout


needs_compiler = pytest.mark.skipif(not compiler.has_compiler(), reason="neither NVRTC nor nvcc is installed")


def edits_of(kernel: str, name: str) -> tuple[Edit, ...]:
    return next(part.edits for parts in PARTS[kernel] for part in parts if part.name == name)


@needs_compiler
def test_decode_without_copies_and_products_has_their_instructions_and_does_not_run_them(tmp_path):
    """Into the user's cache: only a change is compiled again."""
    shape = decode_geometry(8, (4608, 3584), 0, cluster=8, clusters=16, limit=232448)
    code = Code("decode", tuple(decode.macros(shape, "nvfp4").items()))
    text = sass(ablation_worker.compile_part(code, edits_of("decode", "no copies, no products"), "sm_90a"), tmp_path)
    products = re.findall(r"(@!?P\d)?\s+HMMA\.16816", text)
    # Four of a unit, which stands there three times; h and B h have two each, and B h its second trip.
    assert len(products) == 18 and sum(map(bool, products)) >= 12
    assert len(re.findall(r"LDGSTS", text)) == 12
    assert len(re.findall(r"UBLKCP", text)) == 1, "x"
    assert len(re.findall(r"HMUL2\.BF16|HFMA2\.(?:MMA\.)?BF16", text)) >= 16, "weights are expanded"


@needs_compiler
def test_middle_without_loads_and_products_expands_weights(tmp_path):
    device = SimpleNamespace(multiprocessors=132, shared_limit=232448, resident_clusters=lambda launch: 66)
    shape = choose(32, 288, 56, device)
    code = Code("middle", tuple(middle.macros(shape).items()), middle.wgmma_source(shape.tokens))
    text = sass(ablation_worker.compile_part(code, edits_of("middle", "no loads, no products"), "sm_90a"), tmp_path)
    # Those of h, four, and of B h, two, stay.
    assert len(re.findall(r"HGMMA\.64x32x16", text)) == 6
    assert len(re.findall(r"UTMALDG", text)) == 5
    assert len(re.findall(r"HMUL2\.BF16|HFMA2\.(?:MMA\.)?BF16", text)) >= 16, "weights are expanded"


def test_the_most_important_cells_come_first():
    cells = all_cells(["7B", "32B", "14B"], [8, 32, 1, 64], [32, 64, 0, 16])
    assert [str(cell) for cell in cells[:8]] == [
        *("7B/32/8", "32B/32/8", "7B/32/32", "32B/32/32"),
        *("7B/32/1", "32B/32/1", "7B/32/64", "32B/32/64"),
    ]
    assert [str(cell) for cell in cells[8:16]] == [
        *("7B/64/8", "32B/64/8", "7B/64/64", "32B/64/64"),
        *("7B/16/8", "32B/16/8", "7B/16/64", "32B/16/64"),
    ]
    assert [str(cell) for cell in cells[16:]] == ["14B/32/8", "14B/32/32", "14B/32/1", "14B/32/64"]
    assert [cell.base for cell in cells] == [True] * 8 + [False] * 8 + [True] * 4
    assert [cell.kernel for cell in cells[:3]] == ["decode", "decode", "middle"]
    assert Cell("7B", 16, 32).kernel == "decode" and Cell("7B", 17, 32).kernel == "middle"
    few = [part.name for part in cells[8].parts]
    assert few[:2] == [ALL, "with adapters"] and few[-1] == AGAIN and len(few) == 7
    assert not any(part.adapters for part in Cell("7B", 8, 0).parts)


CELLS = (Cell("7B", 8, 32, base=False), Cell("7B", 64, 32, base=False), Cell("32B", 8, 32, base=False))
TIMED = {name: {"us": 2.0, "us_p20": 1.9, "us_p80": 2.1} for name in PRODUCTS}


def faulty(connection, plan: Plan) -> None:
    """Of the first cell one part hangs, one kills the process, one is a fault of the device; the second cell is wrong."""

    def tell(kind, **content):
        connection.send((kind, content))

    tell("step", what="start", seconds=30.0)
    tell("facts", copy_bytes_per_second=4e12)
    for cell in plan.cells:
        parts = plan.parts(cell)
        if not parts or time.monotonic() > plan.until:
            continue
        tell("step", what="check", cell=cell, seconds=30.0)
        if cell == CELLS[1]:
            tell("failed", cell=cell, part="", error="error 1.0")
            continue
        tell("cell", cell=cell, floor_us=[1.0] * 4, floor_us_with_adapters=[1.5] * 4)
        for part in parts:
            tell("step", what=part.name, cell=cell, part=part.name, seconds=0.4)
            if part.name == "h known":
                time.sleep(1000)
            if part.name == "h not waited for":
                os._exit(3)
            if part.name == "h not expanded":
                tell("fault", error="RuntimeError: an illegal instruction")
                return
            tell("part", cell=cell, part=part.name, found=TIMED | ({} if part.edits else {"layer in turn": TIMED["o"]}))
    tell("end")


def test_what_hangs_or_dies_is_killed_told_of_and_not_begun_again(tmp_path, capsys):
    out = tmp_path / "ablation.json"
    run = Ablation(CELLS, 60.0, out, faulty, start_method="fork")
    run.run()
    found = json.loads(out.read_text())
    assert [(entry["cell"], entry["part"]) for entry in found["failed"]] == [
        ("7B/32/8", "h known"), ("7B/32/8", "h not waited for"), ("7B/32/8", "h not expanded"), ("7B/32/64", ""),
    ]  # fmt: skip
    reasons = [entry["error"] for entry in found["failed"]]
    assert reasons[0].startswith("no answer within 0.4 s (exit status -9")
    assert reasons[1] == "the process died (exit status 3)"
    assert reasons[2].startswith("RuntimeError: an illegal instruction")
    assert found["left_out_after_a_failure"] == ["decode h known", "decode h not expanded", "decode h not waited for"]
    assert found["not_reached"] == [] and found["copy_bytes_per_second"] == 4e12
    assert [(row["size"], row["rows"]) for row in found["rows"]] == [("7B", 8), ("32B", 8)]
    for row in found["rows"]:
        assert list(row["parts"]) == ["all", "with adapters", "pieces of h alone", "all again"]
        assert row["floor_us"]["sum"] == 4.0
        assert row["parts"]["all"]["sum_us"] == 8.0 and row["parts"]["all"]["of_floor"] == 0.5
        assert row["parts"]["with adapters"]["of_floor"] == 0.75
        assert row["parts"]["all"]["gate up"] == TIMED["gate up"]
    shown = capsys.readouterr().out
    assert "FAILED 7B/32/8 h known" in shown and "7B, 8 rows of x, rank 32, decode, us" in shown


def test_what_the_time_does_not_suffice_for_is_left_out_and_said(tmp_path, monkeypatch):
    out = tmp_path / "ablation.json"
    Ablation(CELLS, 0.0, out, faulty, start_method="fork").run()
    assert json.loads(out.read_text())["not_reached"] == ["7B/32/8", "7B/32/64", "32B/32/8"]
    monkeypatch.setattr(ablation, "ENDING_SECONDS", 0.1)
    Ablation(CELLS, 0.2, out, faulty, start_method="fork").run()
    found = json.loads(out.read_text())
    assert found["failed"] == [], "it was not the part that hung, as far as can be told"
    assert found["not_reached"][0].startswith("7B/32/8")
    assert found["not_reached"][-2:] == ["7B/32/64", "32B/32/8"]


@pytest.fixture
def toy_device(monkeypatch):
    """The worker with toy shapes on the CPU: nothing is compiled, and the reference multiplies."""
    monkeypatch.setitem(ablation_worker.SHAPES, "toy", {"hidden_size": 128, "intermediate_size": 192, "heads": (4, 2)})
    spoilt = set()

    def product(linear, x_TI, with_adapters):
        if linear.weight.order == "tiles":
            return None
        y = fp4_linear(x_TI, linear.weight, linear.bias_O, linear.parts if with_adapters else (), kernel="reference")
        return y * (1.01 if "wrong" in spoilt else 1.0)

    def compiled(code, edits, arch):
        if edits and "refused" in spoilt:
            raise ValueError("does not compile")
        return b""

    monkeypatch.setattr(ablation_worker, "run_product", product)
    monkeypatch.setattr(ablation_worker, "code_of", lambda kernel, *given: Code(kernel, (("NT", 1),)))
    monkeypatch.setattr(ablation_worker, "compile_part", compiled)
    monkeypatch.setattr(ablation_worker, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(ablation_worker, "captured", lambda *runs, calls: [run() for run in runs] and [2.0, 1.0, 3.0])
    monkeypatch.setattr(ablation_worker, "CACHE_BYTES", 1e5)
    monkeypatch.setattr(ablation_worker.Device, "_clean", lambda self: None)
    told = []
    device = ablation_worker.Device(lambda kind, **content: told.append((kind, content)), torch.device("cpu"))
    return device, told, spoilt


def test_the_worker_checks_and_times_every_part(toy_device):
    device, told, _ = toy_device
    cells = (Cell("toy", 8, 16), Cell("toy", 64, 8, base=False))
    device.run(Plan(cells=cells, until=time.monotonic() + 60))
    parts = [(content["cell"], content["part"]) for kind, content in told if kind == "part"]
    assert parts == [(cell, part.name) for cell in cells for part in cell.parts]
    for kind, content in told:
        if kind == "part":
            assert {*PRODUCTS} <= content["found"].keys()
            assert ("layer in turn" in content["found"]) == (content["part"] in ("all", "all again", "with adapters"))
            assert content["found"]["o"] == {"us": 2.0, "us_p20": 1.0, "us_p80": 3.0}
        if kind == "cell":
            assert 0 < content["largest_error"] < ablation_worker.LARGEST_ERROR
            assert all(
                0 < one < other
                for one, other in zip(content["floor_us"], content["floor_us_with_adapters"], strict=True)
            )
            assert content["launches"]["q k v"] == [{"NT": 1}, {"NT": 1}]


def test_a_wrong_kernel_is_not_timed_and_what_does_not_compile_is_left_out(toy_device):
    device, told, spoilt = toy_device
    spoilt.add("refused")
    device.run(Plan(cells=(Cell("toy", 8, 16, base=False),), until=time.monotonic() + 60))
    assert [content["part"] for kind, content in told if kind == "part"] == ["all", "with adapters", "all again"]
    assert [content["part"] for kind, content in told if kind == "failed"] == [
        "h known", "h not waited for", "h not expanded", "pieces of h alone",
    ]  # fmt: skip
    told.clear()
    spoilt.add("wrong")
    device.run(Plan(cells=(Cell("toy", 8, 16),), until=time.monotonic() + 60))
    assert not any(kind == "part" for kind, _ in told)
    assert "of toy/16/8, rank" in next(
        content["error"] for kind, content in told if kind == "failed" and not content["part"]
    )
    told.clear()
    device.run(Plan(cells=(Cell("toy", 8, 16),), until=0.0))
    assert told == []


def test_inside_edits_both_kernels_are_launched_edited(monkeypatch):
    loaded = []
    monkeypatch.setattr(ablation_worker, "_loaded", lambda *given: loaded.append(given))
    before, edits = (decode.compiled, middle.compiled), (Edit("decode.cu", "a", "b"),)
    with ablation_worker.edited(edits):
        decode.compiled("cuda:0", *Code("decode", (("NT", 1),)))
        middle.compiled("cuda:0", *Code("middle", (), "extra"))
    assert loaded == [
        ("cuda:0", Code("decode", (("NT", 1),)), edits),
        ("cuda:0", Code("middle", (), "extra"), edits),
    ]
    assert (decode.compiled, middle.compiled) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rows 0", "no number from 1 on"),
        ("--rows 8 129", "--rows 129: expected at most 128"),
        ("--ranks 12", "--ranks 12: expected multiples of 8"),
        ("--ranks -8", "no number from 0 on"),
        ("--sizes 9B", "invalid choice: '9B'"),
        ("--seconds 0", "expected more than 0"),
    ],
)
def test_options_that_cannot_be_are_refused(words, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ablation.py", *words.split()])
    with pytest.raises(SystemExit) as ended:
        ablation.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err

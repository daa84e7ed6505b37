"""Decode attention with parts left out (`benchmarks/decode_parts.py`): what stays, what goes, and that counters end where they began."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton_cpu  # noqa: F401 - before the kernels

from benchmarks import decode_attention, decode_parts
from benchmarks.ablation_parts import Edit
from benchmarks.decode_parts import PARTS
from qerl.kernels.cached_attention import CacheRows, reference
from qerl.kernels.cached_attention import triton as cached_attention
from qerl.kernels.cached_attention.plan import Plan

pytestmark = pytest.mark.interpret
HERE = Path(__file__).parent
LENGTH, PARTS_OF_ROW = 64 * 40 - 10, Plan(first=20, most=20, programs=40)
"""20 parts of two tiles: more than one join of eight."""


@pytest.fixture(scope="module")
def inputs():
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    turns = torch.ones(1, 64), torch.zeros(1, 64)
    table = torch.randperm(40, generator=generator)[None].int() + 1
    rows = CacheRows(torch.tensor([LENGTH]), 64, table_BN=table)
    return normal(1, 8 * 64), turns, 4, 2, normal(41, 64, 2, 64), normal(41, 64, 2, 64), rows, 0.1


@pytest.mark.parametrize("name", PARTS)
def test_every_variant_runs_to_its_end_and_only_the_whole_one_is_right(inputs, name):
    qkv, turns, heads, kv_heads, k, v, rows, scale = inputs
    wide = qkv.double(), turns, heads, kv_heads, k.double(), v.double(), rows, scale
    exact = reference.cached_attention(*wide)
    with decode_parts.left_out(name):
        found = cached_attention.cached_attention(*inputs, None, PARTS_OF_ROW)
    error = float((found.double() - exact).norm() / exact.norm())
    assert (error < 1e-5) == (not PARTS[name])
    assert not cached_attention._arrivals(qkv.device, 2 * 9).any(), "the next kernel counts from 0"


def test_what_is_left_out_is_a_text_that_the_sources_have_once():
    """A kernel that changes brings its ablation with it."""
    whole = decode_parts.patched(())
    for name, edits in PARTS.items():
        assert (decode_parts.patched(edits) == whole) == (not edits), name
    for edit in (Edit("device", "no such text", ""), Edit("contexts", "tl.load", "")):
        with pytest.raises(ValueError, match=rf"{edit.file} has \d+ times what an ablation replaces once"):
            decode_parts.patched([edit])


def test_variants_compile_for_hopper_with_the_copies_of_the_whole_kernel():
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(HERE / "compile_decode_parts.py")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    own, *others = (json.loads(line) for line in result.stdout.splitlines())
    found = dict(zip(PARTS, others, strict=True))
    assert found["all"] == found["all again"] == own
    assert own["copies"] > 0 and own["products"] > 0 and own["counters"] == 2
    for name, one in found.items():
        assert [one[what] for what in ("copies", "products", "ahead")] == [
            own[what] for what in ("copies", "products", "ahead")
        ], name
        assert one["counters"] == 2 - ("no joins" in name or "one join" in name), name
        assert one["shared"] <= own["shared"], name


def test_a_row_of_the_table_holds_every_part_beside_the_whole(monkeypatch):
    class Cell:
        facts, floor_us, left = {"size": "7B", "cell": "1x32768"}, 15.7, list(range(20, 20 + len(PARTS)))

        def __init__(self, size, name, *, together):
            assert (size, name, together) == ("7B", "1x32768", False)

        def error(self):
            return 0.001

        def times(self, fewest_calls):
            us = self.left.pop()
            return [us, us - 1, us + 1]

    monkeypatch.setattr(decode_attention, "Cell", Cell)
    rows = list(decode_attention.in_parts("7B", "1x32768"))
    parts = rows[-1]["parts"]
    assert len(rows) == len(PARTS) and [*parts] == [*PARTS]
    assert parts["all"]["less_us"] == 0 and parts["all again"]["less_us"] == len(PARTS) - 1


@pytest.mark.parametrize("words", ["--parts --cells 64x704:256/8"])
def test_parts_of_rows_that_read_together_are_refused(monkeypatch, capsys, tmp_path, words):
    monkeypatch.setattr("sys.argv", ["decode_attention", "--out", str(tmp_path / "x.json"), *words.split()])
    with pytest.raises(SystemExit):
        decode_attention.main()
    assert "of which no parts are left out" in capsys.readouterr().err

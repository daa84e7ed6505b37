"""Compile the variants of `benchmarks/decode_parts.py` for a Hopper GPU that is not here, and print what is in them, a JSON object a line, the package's own kernel first."""

import json
import sys
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton_compile import signature_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import decode_parts
from qerl.kernels.cached_attention import CacheRows
from qerl.kernels.cached_attention import triton as cached_attention

COUNTED = {
    "copies": "cp.async.cg",
    "products": "mma",
    "exponentials": "ex2.",
    "counters": "atom.",
    "ahead": "prefetch.",
}
DIVISIBLE = ("_ptr", "_stride")


def run(self, *arguments, grid, warmup, **options):
    """As a launch compiles on a device: pointers and distances are multiples of 16."""
    types, known = signature_of(self, arguments, options)
    names = [p.name for p in self.params]
    flags = {name: value for name, value in options.items() if name not in names} | {"launch_pdl": True}
    whole = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in types.items()
        if kind != "constexpr" and name.endswith(DIVISIBLE)
    }
    source = ASTSource(self, types, known | {"OVERLAP": True}, whole)
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=flags)
    # Names of instructions alone: the text also names files and lines.
    lines = [line.split() for line in binary.asm["ptx"].splitlines() if line.startswith("\t") and ".loc" not in line]
    words = [word for line in lines for word in line[:2]]
    found = {name: sum(word.startswith(text) for word in words) for name, text in COUNTED.items()}
    print(json.dumps(found | {"shared": binary.metadata.shared}))


if __name__ == "__main__":
    JITFunction.run = run
    cached_attention._processors = lambda device: 132
    turns, qkv, cache = torch.zeros(1, 128), torch.zeros(1, 36 * 128).bfloat16(), torch.zeros(4, 64, 4, 128).bfloat16()
    rows = CacheRows(torch.zeros(1, dtype=torch.int64), 64, table_BN=torch.zeros(1, 513, dtype=torch.int32))
    inputs = qkv, (turns, turns), 28, 4, cache, cache, rows, 0.1
    cached_attention.cached_attention(*inputs)
    for name in decode_parts.PARTS:
        with decode_parts.left_out(name):
            cached_attention.cached_attention(*inputs)

"""Kernels of fp4_linear with parts left out, for `benchmarks/ablation.py`: each is today's source with some of its text replaced.

What is left out stands behind a condition that never holds and that the compiler cannot know (`p.scale_base`, 0x70007000, is compared with 0; the grid has a
second dimension), so that code, registers and what leads to it stay. Numbers are wrong then; nothing waits for what does not come. Of NVFP4 alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from qerl.kernels.fp4_linear.workspace import source_files


@dataclass(frozen=True, slots=True)
class Edit:
    """A text of a source that is replaced, and stands there once."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Part:
    """A kernel with something left out."""

    name: str
    edits: tuple[Edit, ...] = ()
    adapters: bool = False
    """Whether it is timed with adapters; without them otherwise."""


ALL, WITH_ADAPTERS, AGAIN = "all", "with adapters", "all again"


def patched_source(name: str, edits: Iterable[Edit], extra: str = "") -> str:
    """As `workspace.whole_source`, edited.

    Raises:
        ValueError: a text that is to be replaced is not there once: the source has changed, and the edit must follow it.
    """
    files = source_files(name)
    for edit in edits:
        found = files[edit.file].count(edit.old) if edit.file in files else 0
        if found != 1:
            raise ValueError(f"{name}: {edit.file} has {found} times what an ablation replaces once:\n{edit.old}")
        files[edit.file] = files[edit.file].replace(edit.old, edit.new)
    *front, kernel = files.values()
    return "".join(front) + extra + kernel


def _before(file: str, anchor: str, text: str) -> Edit:
    return Edit(file, anchor, text + anchor)


def _behind(file: str, anchor: str, text: str) -> Edit:
    return Edit(file, anchor, anchor + text)


_RETURN = """
  if (p.scale_base != 0) {
    dependents_may_start();
    dependencies_wait();
    return;
  }
"""

# ---- decode

# Products of units alone: those of adapters stand elsewhere. The instruction is there, and its predicate is false.
_DECODE_NO_PRODUCTS = (
    _before(
        "decode.cuh",
        "// One unit: 16 rows x 64 inputs from the ring, times x.\n",
        """__device__ __forceinline__ void mma_if_zero(u32 never, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "{\\n.reg .pred on;\\nsetp.eq.u32 on, %10, 0;\\n"
      "@on mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\\n}"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(never));
}
#define mma_m16n8k16(c, a, b0, b1) mma_if_zero(unpacker.scale_base, c, a, b0, b1)
""",
    ),
    _before(
        "decode.cuh",
        "// Where the partial sums of one warp go: to the block that finishes the tile",
        "#undef mma_m16n8k16\n",
    ),
)
# The codes of a unit are its fragment, the same in all four k16 steps: they are four registers in a row already.
_DECODE_NO_EXPANSION = (
    Edit("decode.cuh", "  const Scales scales = expand_scales(bytes, unpacker, rows);\n", ""),
    Edit(
        "decode.cuh",
        "  dequantize_step<0>(look_up(word_of<0>(codes), unpacker), scales, a);\n",
        "  a[0] = codes.x ^ bytes.x, a[1] = codes.y ^ bytes.y, a[2] = codes.z, a[3] = codes.w;\n",
    ),
    *(
        Edit("decode.cuh", f"  dequantize_step<{step}>(look_up(word_of<{step}>(codes), unpacker), scales, a);\n", "")
        for step in (1, 2, 3)
    ),
)
_DECODE_NO_COPIES = (
    _before(
        "decode.cu",
        "// Starts the copies of the next pair of units, or of the last one of a round, as one group; an empty group at the end.\n",
        """#define copy_codes(target, source) if (p.scale_base == 0) copy_codes(target, source)
#define copy_async_16(target, source) if (p.scale_base == 0) copy_async_16(target, source)
#define copy_async_16_where(copies, target, source) if (p.scale_base == 0) copy_async_16_where(copies, target, source)
""",
    ),
    _before(
        "decode.cu",
        'extern "C" __global__ void __launch_bounds__(THREADS, 1) decode(',
        "#undef copy_codes\n#undef copy_async_16\n#undef copy_async_16_where\n",
    ),
)
# A unit is not read, expanded or multiplied; its sums, zeros, go their way.
_DECODE_NO_UNITS = (
    _before(
        "decode.cu",
        'extern "C" __global__ void __launch_bounds__(THREADS, 1) decode(',
        "#define multiply_unit(...) if (p.scale_base == 0) multiply_unit(__VA_ARGS__)\n",
    ),
)
_GATHER = "      before = gather_h(p, s, needed_groups(p, w), thread - 32 * WARPS);\n"
_SHRINK = "    shrink(p, s, w, cluster, clusters, a, warp, lane);\n"
_DECODE_KNOWN_H = (
    _before("decode.cu", _SHRINK, "    if (p.scale_base == 0)\n  "),
    _before("decode.cu", _GATHER, "      if (p.scale_base == 0)\n  "),
    Edit(
        "decode.cu",
        "  if (cluster < p.groups * p.chunks) {\n",
        "  if (p.scale_base == 0 && cluster < p.groups * p.chunks) {\n",
    ),
)
_DECODE_NO_WAIT = (Edit("decode.cu", "      } while (wait);\n", "      } while (wait && p.scale_base == 0);\n"),)
_DECODE_NO_EXPAND = (
    Edit(
        "decode.cuh",
        "      if (!part_needed(part, tile, tile + 1)) continue;\n",
        "      if (p.scale_base != 0 || !part_needed(part, tile, tile + 1)) continue;\n",
    ),
)
_DECODE_NO_GATHER = (_before("decode.cu", _GATHER, "      if (p.scale_base == 0)\n  "),)

DECODE = (
    Part(ALL),
    Part("no products", _DECODE_NO_PRODUCTS),
    Part("no expansion", _DECODE_NO_EXPANSION),
    Part("no copies", _DECODE_NO_COPIES),
    Part("copies alone", _DECODE_NO_UNITS),
    Part("no copies, no products", _DECODE_NO_COPIES + _DECODE_NO_PRODUCTS),
    Part("no copies, no expansion", _DECODE_NO_COPIES + _DECODE_NO_EXPANSION),
    Part("neither copies nor units", _DECODE_NO_COPIES + _DECODE_NO_UNITS),
    Part("empty", (_behind("decode.cu", "  __shared__ u64 arrived;\n", _RETURN),)),
)
DECODE_ADAPTERS = (
    Part(WITH_ADAPTERS, adapters=True),
    Part("h known", _DECODE_KNOWN_H, True),
    Part("h not waited for", _DECODE_NO_WAIT, True),
    Part("h not expanded", _DECODE_NO_EXPAND, True),
    Part("pieces of h alone", _DECODE_NO_GATHER + _DECODE_NO_EXPAND, True),
)

# ---- middle

_MIDDLE_NO_OUTPUT = (
    _before("middle.cuh", "  if (p.float_out) {\n    store_floats<NC>(p, v,", "  if (p.scale_base != 0) return;\n"),
)
# Who begins a tile stores its own sums, so that as much is stored.
_WHOLE = "    const bool whole = steps == p.units || share_tile("
_MIDDLE_NO_SHARING = (
    Edit(
        "middle.cu",
        _WHOLE,
        _WHOLE.replace("steps ==", "p.scale_base != 0 ? place.unit == 0 : steps =="),
    ),
)
# A barrier waits for as many bytes as are copied: none. Of a piece of h, A's.
_MIDDLE_NO_LOADS = (
    _before("middle.cu", "copy_box<false>(stage + X_BYTES, p.tile_map,", "if (p.scale_base == 0) "),
    _before("middle.cu", "copy_box<(CLUSTER > 1)>(stage + part * 128,", "if (p.scale_base == 0) "),
    Edit("middle.cu", "barrier_expect(full + 8 * stage, STEP_BYTES);", "barrier_expect(full + 8 * stage, 0);"),
    Edit("middle.cu", "barrier_expect(barrier, STEP_BYTES);", "barrier_expect(barrier, 0);"),
    Edit("middle.cu", "barrier_expect(barrier, PIECE_STEP_BYTES);", "barrier_expect(barrier, PIECE_RANKS * 128);"),
)
# Four operations a k16 step remain, which put codes into the registers of a fragment.
_MIDDLE_NO_EXPANSION = (
    Edit(
        "middle.cu",
        "      const Scales scales = expand_scales(w.scales[i], unpack, packed_rows[i]);\n",
        "      const Scales scales = {w.scales[i], w.scales[i]};\n",
    ),
    Edit(
        "middle.cu",
        "  dequantize_step<J>(codes, scales, a);\n",
        "  a[0] = codes ^ scales.low.x, a[1] = codes ^ scales.low.y, a[2] = codes ^ scales.high.x, a[3] = codes ^ scales.high.y;\n",
    ),
)
# Two FMAs, which keep the fragment, in the place of a product of 64 rows x TOKENS.
_MIDDLE_NO_PRODUCTS = (
    Edit(
        "middle.cu",
        "  multiply(d, a, x + 2 * J);\n",
        "  d[0] += __uint_as_float(a[0]) * __uint_as_float(a[1]), d[1] += __uint_as_float(a[2]) * __uint_as_float(a[3]);\n",
    ),
)
# A step is waited for and given back, as ever.
_MIDDLE_NO_STEPS = (
    _before("middle.cu", "load_packed(w, mine + r.stage * STAGE_BYTES, lane);\n", "if (unpack.scale_base == 0) "),
    _behind(
        "middle.cu",
        "    // Lookups are a k16 step ahead.\n",
        "    if (unpack.scale_base != 0) {\n      if (step > 0) release(before, lane);\n      continue;\n    }\n",
    ),
)
_MAKE = "  all_blocks(p.h_counters, thread);\n  round_h(p, thread);\n  all_blocks(p.h_counters + 1, thread);\n"
_MIDDLE_NO_ROUND = (Edit("adapters.cuh", _MAKE, f"  if (p.scale_base != 0) return;\n{_MAKE}"),)
_MIDDLE_KNOWN_H = (
    *_MIDDLE_NO_ROUND,
    Edit(
        "adapters.cuh",
        "return gridDim.x / CLUSTER - 1 - blockIdx.x / CLUSTER; }",
        "return gridDim.x / CLUSTER - 1 - blockIdx.x / CLUSTER + (gridDim.y << 30); }",
    ),
)
_MIDDLE_NO_WAIT = (
    Edit(
        "adapters.cuh",
        "  if (thread == 0) {\n    count_up(counter, 2 * gridDim.x - 1);\n",
        "  if (thread == 0 && gridDim.y == 0) {\n    count_up(counter, 2 * gridDim.x - 1);\n",
    ),
)
_MIDDLE_NO_EXPAND = (
    Edit("adapters.cuh", "  return part.scale != 0 && part.row_start", "  return gridDim.y == 0 && part.scale != 0 && part.row_start"),
)  # fmt: skip

MIDDLE = (
    Part(ALL),
    Part("no products", _MIDDLE_NO_PRODUCTS),
    Part("no expansion", _MIDDLE_NO_EXPANSION),
    Part("no loads", _MIDDLE_NO_LOADS),
    Part("no sums between blocks", _MIDDLE_NO_SHARING),
    Part("no output", _MIDDLE_NO_OUTPUT),
    Part("loads alone", _MIDDLE_NO_STEPS),
    Part("no loads, no products", _MIDDLE_NO_LOADS + _MIDDLE_NO_PRODUCTS),
    Part("no loads, no expansion", _MIDDLE_NO_LOADS + _MIDDLE_NO_EXPANSION),
    Part("neither loads nor steps", _MIDDLE_NO_LOADS + _MIDDLE_NO_STEPS),
    Part(
        "neither loads, steps, sums nor output",
        _MIDDLE_NO_LOADS + _MIDDLE_NO_STEPS + _MIDDLE_NO_SHARING + _MIDDLE_NO_OUTPUT,
    ),
    Part(
        "empty",
        (_behind("middle.cu", 'asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));  // read once', _RETURN),),
    ),
)
MIDDLE_ADAPTERS = (
    Part(WITH_ADAPTERS, adapters=True),
    Part("h known", _MIDDLE_KNOWN_H, True),
    Part("h not waited for", _MIDDLE_NO_WAIT, True),
    Part("h not expanded", _MIDDLE_NO_EXPAND, True),
    Part("pieces of h alone", _MIDDLE_NO_ROUND + _MIDDLE_NO_EXPAND, True),
)

PARTS = {"decode": (DECODE, DECODE_ADAPTERS), "middle": (MIDDLE, MIDDLE_ADAPTERS)}
"""Kernel -> what is timed without adapters, and with them."""

"""Which kernel takes how many rows of x: the one place that chooses, by times on an H200 (README.md, Measured).

decode   the weight is read once for a group of rows, on CUDA cores' side of the memory limit
middle   sm_90: the weight is expanded once for up to 256 rows, on the way into the matrix units
kept     sm_90: V is kept in memory; one launch with the adapters inside
dense    one pass of dequantization into scratch, then cuBLAS
"""

from __future__ import annotations

DECODE, MIDDLE, KEPT, DENSE = "decode", "middle", "kept", "dense"

HOPPER = (9, 0)
DECODE_ROWS = 16
"""Rows of x up to which decode is fastest where there is a middle kernel."""
DECODE_ROWS_OF = {"nf4": 8, "nf4_dq": 8, "fp8": 8}
"""The same of formats of which a tile costs decode more: looked up, or a byte a number."""
DECODE_ROWS_OF_HEAD = 8
"""The same of an LM head: outputs of twice the bytes, and no adapters that the middle kernel would wait for."""
MIDDLE_ROWS = 8192
"""Rows of x up to which the middle kernel is faster than dense."""
MIDDLE_ROWS_OF_HEAD = 1024
"""The same of an LM head, which was timed up to here: at 1,024 tokens it takes cuBLAS's time."""
RUN_ROWS = 2048
"""Rows of x of one launch of the middle kernel, at most: x of so many, and the weights of the tiles that run at one time, stay in the cache."""
SMALL_WEIGHT, MIDDLE_ROWS_OF_SMALL = 10_000_000, 128
"""Of a weight of fewer numbers than the first (every one of a 0.5B model), the dequantized copy stays in the cache: the middle kernel is
faster only up to so many rows of x."""
DECODE_ROWS_WITHOUT_MIDDLE = 64
"""Rows of x up to which reading the weight once for every group of rows pays where there is no middle kernel."""
KEPT_ROWS, KEPT_ROWS_OF_BASE = range(17, 2049), range(17, 257)
"""Numbers of rows of x for which the kernel that reads kept V is fastest, with and without adapters. V is kept of small weights alone; above,
without adapters, dense multiplies with it."""
KEPT_ROWS_WITHOUT_TILES = range(1, KEPT_ROWS.stop)
"""The same with adapters, of a weight that has no tiles for decode to read (an unquantized one): what is left to fewer rows is cuBLAS and the adapters'
products, which take twice as long as the kernel at 32 rows, and it has as many tiles at any number up to 64."""

MOST_ROWS = max(MIDDLE_ROWS, DECODE_ROWS_WITHOUT_MIDDLE, KEPT_ROWS.stop - 1)
"""Rows of x above which no device and no weight has another kernel than dense."""


def many_rows(*, head: bool = False) -> int:
    """Rows of x up to which the middle kernel is asked, of a weight that is not small or of an LM head."""
    return MIDDLE_ROWS_OF_HEAD if head else MIDDLE_ROWS


def few_rows(name: str, *, head: bool = False) -> int:
    """Rows of x up to which decode is asked before the middle kernel, of a weight in the format called `name` or of an LM head."""
    return DECODE_ROWS_OF.get(name, DECODE_ROWS_OF_HEAD if head else DECODE_ROWS)


def preferred(
    rows: int,
    numbers: int,
    capability: tuple[int, int],
    *,
    kept: bool = False,
    adapters: bool = True,
    tiled: bool = True,
    few: int = DECODE_ROWS,
    many: int = MIDDLE_ROWS,
) -> tuple[str, ...]:
    """The kernels to ask for `rows` rows of x and a weight of `numbers` numbers on a device, in turn; dense takes what they leave.

    Args:
        kept: V is kept.
        adapters: there are adapters.
        tiled: the weight has tiles; of another, V alone can be read.
        few: rows up to which decode is asked before the middle kernel (`few_rows`).
        many: rows up to which the middle kernel is asked for a weight that is not small (`many_rows`).
    """
    of_kept = (KEPT_ROWS if tiled else KEPT_ROWS_WITHOUT_TILES) if adapters else KEPT_ROWS_OF_BASE
    if kept and capability == HOPPER and rows in of_kept:
        return (KEPT, *preferred(rows, numbers, capability, tiled=tiled, few=few, many=many))
    if not tiled:
        return ()
    decode = (DECODE,) if rows <= DECODE_ROWS_WITHOUT_MIDDLE else ()
    most = MIDDLE_ROWS_OF_SMALL if numbers < SMALL_WEIGHT else many
    if capability != HOPPER or rows > most:
        return decode
    return (DECODE, MIDDLE) if rows <= few else (MIDDLE, *decode)


def one_of_each(capability: tuple[int, int], *, kept: bool = False) -> tuple[int, ...]:
    """Numbers of rows of x that lie in different regimes of a device, one for each; `kept` as in `preferred`."""
    if kept and capability == HOPPER:
        return DECODE_ROWS // 2, KEPT_ROWS_OF_BASE[len(KEPT_ROWS_OF_BASE) // 2], MOST_ROWS + 1
    if capability == HOPPER:
        return DECODE_ROWS // 2, 100, MOST_ROWS + 1
    return 8, 32, DECODE_ROWS_WITHOUT_MIDDLE + 1

"""Compiling what products of any number of rows will run, before the first of them, on all cores: a training pass or a prefill has any number of
rows, and the number decides the kernel and its tiles. Otherwise each variant is compiled where it is first met, one after the other, in the middle
of a step.

Legend: T rows of x, I inputs, O output rows.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import torch
import triton

from qerl.kernels.cuda import architecture
from qerl.kernels.fp4_linear import cuda, decode, dense, kept, middle, regimes, shrink
from qerl.kernels.fp4_linear.adapter import Layer, flatten
from qerl.kernels.fp4_linear.workspace import Code, compile_source, compiled

_STEP = 8
"""Rows of x from one number that is asked for to the next: tiles are whole multiples of it, so that it meets every variant."""
_MOST_ROWS = max(regimes.KEPT_ROWS.stop, regimes.RUN_ROWS + 1, shrink.MOST_ROWS + 1)
"""Rows of x from which on nothing is met that fewer did not meet: the middle kernel has more in several launches."""


def compile_ahead(layers: Sequence[Layer], most_rows: int) -> None:
    """See `qerl.kernels.fp4_linear.compile_ahead`."""
    try:
        # What tells Triton to compile in other threads is a variable of the context, which Triton leaves set where a compilation fails.
        copy_context().run(_compile, layers, most_rows)
    except BaseException:
        # It also keeps the failure in the place of the kernel; the first product of such a size shall try again.
        kept.forget()
        raise


def _compile(layers: Sequence[Layer], most_rows: int) -> None:
    codes: dict[Code, None] = {}
    start = time.monotonic()
    begun, device = False, layers[0].weight.device
    with ThreadPoolExecutor(max_workers=min(os.cpu_count() or 1, 8)) as pool:
        try:
            with triton.AsyncCompileMode(pool) as others:
                for layer in layers:
                    for code in _codes(layer, most_rows):
                        codes.setdefault(code)
                count = len(codes) + len(others.future_kernels)
                if not count:
                    return
                begun = True
                print(
                    f"qerl: {count} kernels of linear layers for any number of tokens:",
                    end=" ",
                    file=sys.stderr,
                    flush=True,
                )
                arch = architecture(device)
                for made in [
                    pool.submit(compile_source, c.name, arch, dict(c.defines), c.extra, quiet=True) for c in codes
                ]:
                    made.result()
            for code in codes:
                compiled(device, *code)
            print(f"{time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            if begun:
                print("not made", file=sys.stderr, flush=True)
            raise


def _codes(layer: Layer, most_rows: int) -> Iterator[Code]:
    """What products with one layer are compiled from, some of it several times; kernels of kept values are given to Triton at once."""
    weight, bias_O = layer.weight, layer.bias_O
    placements, a_RI, b_OR = flatten(layer.adapters)
    x_TI = torch.zeros(min(most_rows, _MOST_ROWS), weight.shape[1], dtype=torch.bfloat16, device=weight.device)
    if not cuda.fast(x_TI, weight, layer.dense_OI):
        return
    if weight.order == "tiles":
        yield dense.code(weight.format)
    variants: set[kept.Shape] = set()
    for rows in sorted({*range(_STEP, len(x_TI), _STEP), len(x_TI)}):
        some = x_TI[:rows]
        regime = cuda.regime_of(some, weight, placements, a_RI, b_OR)
        if regime == regimes.DECODE:
            yield decode.code(some, weight, a_RI)
        elif regime == regimes.MIDDLE:
            yield middle.code(some, weight, placements)
        elif regime == regimes.KEPT:
            # Triton reads its source anew for each call, though it compiles each variant once.
            if (variant := kept.variant(some, weight, placements)) not in variants:
                variants.add(variant)
                kept.compile_call(some, weight, bias_O, placements, a_RI, b_OR, dtype=layer.dtype)
        elif a_RI and rows <= shrink.MOST_ROWS and torch.cuda.get_device_capability(weight.device) == regimes.HOPPER:
            yield shrink.code()

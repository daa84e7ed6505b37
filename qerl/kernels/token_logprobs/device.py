# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""The passes over a tile of logits, one token a program; see `qerl.kernels.token_logprobs.triton` for the formulas."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def completed(value, divisor, bias, columns, inside):
    """Logits of one token and tile from the product with the values of the head, float32; -inf beyond the tile."""
    if divisor is not None:
        value = value / tl.load(divisor + columns, mask=inside, other=1.0)
    if bias is not None:
        value += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, value, -float("inf"))


@triton.jit
def tempered(value, temperature, UNIT: tl.constexpr):
    """logits / T. UNIT says that T is 1."""
    if not UNIT:
        value = value / temperature
    return value


@triton.jit
def _scaled(logits, divisor, bias, row, columns, inside, width, temperature, UNIT: tl.constexpr):
    """logits / T of one token and tile, float32; -inf beyond the tile."""
    value = tl.load(logits + row * width + columns, mask=inside, other=0.0)
    return tempered(completed(value, divisor, bias, columns, inside), temperature, UNIT)


@triton.jit(do_not_specialize=["start", "count", "tile", "tiles", "lanes"])
def absorb(
    logits,
    divisor,
    bias,
    targets,
    sums,
    p,
    e,
    values,
    target_rows,
    top,
    top_tokens,
    parts,
    references,
    tile,
    tiles,
    lanes,
    start,
    count,
    width,
    hidden_size,
    temperature,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
):
    """One token and tile: the three sums, l of the target, and p with the target's row of the head if a gradient is wanted; the largest
    logit so far and its token if `top` is given; if `parts` is, the sums of p over every PART tokens, and the reference m that they have."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    value = tl.load(logits + row * width + columns, mask=inside, other=0.0)
    value = completed(value, divisor, bias, columns, inside)
    scaled = tempered(value, temperature, UNIT)
    old = tl.load(sums + row)
    s = tl.load(sums + count + row)
    t = tl.load(sums + 2 * count + row)
    highest = tl.max(scaled, axis=0)
    # The reference follows the maximum only when it must: float32 and bfloat16 hold e^30 as well as 1.
    new = tl.where(highest > old + 30.0, highest, old)
    rise = tl.where(s > 0.0, old - new, 0.0)
    shrink = tl.exp(rise)
    weight = tl.exp(scaled - new)
    above = tl.where(inside, scaled - new, 0.0)
    t = shrink * (t + s * rise) + tl.sum(weight * above, axis=0)
    s = shrink * s + tl.sum(weight, axis=0)
    tl.store(sums + row, new)
    tl.store(sums + count + row, s)
    tl.store(sums + 2 * count + row, t)
    target = tl.load(targets + row) - start
    here = (target >= 0) & (target < width)
    if here:
        tl.store(sums + 3 * count + row, tl.sum(tl.where(columns == target, scaled, 0.0), axis=0))
    if top is not None:
        # Of the logits as they are: two that differ may be equal once they are divided by the temperature.
        largest = tl.max(value, axis=0)
        first = tl.min(tl.where(value == largest, columns, BLOCK), axis=0)
        if largest > tl.load(top + row):
            tl.store(top + row, largest)
            tl.store(top_tokens + row, (start + first).to(tl.int64))
    if parts is not None:
        lane = tl.arange(0, BLOCK // PART)
        part = tl.sum(tl.reshape(weight, (BLOCK // PART, PART)), axis=1)
        tl.store(parts + (row * tiles + tile) * lanes + lane, part, mask=lane < lanes)
        tl.store(references + row * tiles + tile, new)
    if e is not None:
        if divisor is not None:
            weight = weight / tl.load(divisor + columns, mask=inside, other=1.0)
        weight = tl.where(columns == target, 0.0, weight)
        tl.store(p + row * width + columns, weight.to(p.dtype.element_ty), mask=inside)
        channels = tl.arange(0, WIDTH)
        if here:
            scale = 1.0
            if divisor is not None:
                scale = tl.load(divisor + target)
            for first in range(0, hidden_size, WIDTH):
                within = first + channels < hidden_size
                w = tl.load(values + target * hidden_size + first + channels, mask=within, other=0.0).to(tl.float32)
                place = target_rows + row * hidden_size + first + channels
                tl.store(place, (w / scale).to(target_rows.dtype.element_ty), mask=within)
        if rise < 0.0:
            for first in range(0, hidden_size, WIDTH):
                within = first + channels < hidden_size
                place = e + row * hidden_size + first + channels
                tl.store(place, tl.load(place, mask=within, other=0.0) * shrink, mask=within)


@triton.jit(do_not_specialize=["count"])
def finish(
    sums,
    e,
    target_rows,
    top,
    top_logp,
    logp,
    entropy,
    lse,
    slope,
    count,
    hidden_size,
    temperature,
    UNIT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One token: results from its sums, and the gradient of its log-prob to its hidden state if wanted."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.load(sums + count + row)
    log_s = tl.log(s)
    lse_value = tl.load(sums + row) + log_s
    logp_value = tl.load(sums + 3 * count + row) - lse_value
    tl.store(lse + row, lse_value)
    tl.store(logp + row, logp_value)
    tl.store(entropy + row, log_s - tl.load(sums + 2 * count + row) / s)
    if top is not None:
        tl.store(top_logp + row, tempered(tl.load(top + row), temperature, UNIT) - lse_value)
    if e is not None:
        channels = tl.arange(0, WIDTH)
        within = channels < hidden_size
        place = row * hidden_size + channels
        rest = tl.load(e + place, mask=within, other=0.0) / s
        w = tl.load(target_rows + place, mask=within, other=0.0).to(tl.float32)
        result = ((1.0 - tl.exp(logp_value)) * w - rest) / temperature
        tl.store(slope + place, result.to(slope.dtype.element_ty), mask=within)


@triton.jit(do_not_specialize=["start"])
def logits_gradient(
    logits,
    divisor,
    bias,
    targets,
    lse,
    entropy,
    grad_logp,
    grad_entropy,
    grad,
    start,
    width,
    temperature,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token and tile: gradient to the logits from those to log-prob and entropy."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    log_p = _scaled(logits, divisor, bias, row, columns, inside, width, temperature, UNIT) - tl.load(lse + row)
    p = tl.exp(log_p)
    result = tl.zeros((BLOCK,), tl.float32)
    if grad_entropy is not None:
        result -= tl.load(grad_entropy + row) * p * (tl.where(inside, log_p, 0.0) + tl.load(entropy + row))
    if grad_logp is not None:
        chosen = (columns == tl.load(targets + row) - start).to(tl.float32)
        result += tl.load(grad_logp + row) * (chosen - p)
    result = result / temperature
    if divisor is not None:
        result = result / tl.load(divisor + columns, mask=inside, other=1.0)
    tl.store(grad + row * width + columns, result.to(grad.dtype.element_ty), mask=inside)

"""The packed linear layer: against dense products, its gradients, what it keeps, and the gate in front of it."""

from dataclasses import replace

import pytest
import torch

from qerl.errors import LayoutGateError
from qerl.formats import FORMAT_NAMES, dequantize, get_format
from qerl.kernels.fp4_linear import AdapterPart, fp4_linear, layout_gate, reference

TOKENS, INPUTS, ROWS, RANK = 5, 40, (6, 3, 4), 2
OUTPUTS = sum(ROWS)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def packed_weight(name="nvfp4", dtype=torch.float32):
    return get_format(name).quantize(random(OUTPUTS, INPUTS, dtype=dtype), segments=ROWS)


def adapter_tensors(dtype=torch.float64):
    """One stacked A for two parts (the first and last rows of the group), and their B."""
    return (
        random(2 * RANK, INPUTS, seed=1, dtype=dtype),
        random(6, RANK, seed=2, dtype=dtype),
        random(4, RANK, seed=3, dtype=dtype),
    )


def parts_of(a, b_first, b_last):
    return [
        AdapterPart(start=0, stop=6, a_RI=a, b_OR=b_first, scale=0.5),
        AdapterPart(start=9, stop=13, a_RI=a, b_OR=b_last, scale=2.0, rank_start=RANK),
    ]


def dense_reference(x, w, bias, a, b_first, b_last):
    y = x @ w.T + bias
    delta = torch.zeros(OUTPUTS, INPUTS, dtype=x.dtype)
    delta[:6] = 0.5 * b_first @ a[:RANK]
    delta[9:] = 2.0 * b_last @ a[RANK:]
    return y + x @ delta.T


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("cached", [False, True])
def test_values_equal_the_dense_product(name, cached):
    weight, x, bias = packed_weight(name), random(TOKENS, INPUTS, seed=4), random(OUTPUTS, seed=5)
    dense = dequantize(weight, torch.float64)
    y = fp4_linear(x, weight, bias, parts_of(*adapter_tensors()), dense if cached else None)
    # The explicit product rounds s / G to float32 once; the packed one does not round it.
    torch.testing.assert_close(y, dense_reference(x, dense, bias, *adapter_tensors()), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("cached", [False, True])
def test_gradients_match_finite_differences(name, cached):
    weight = packed_weight(name)
    dense = dequantize(weight, torch.float64) if cached else None
    tensors = [
        t.requires_grad_() for t in (random(TOKENS, INPUTS, seed=4), random(OUTPUTS, seed=5), *adapter_tensors())
    ]
    assert torch.autograd.gradcheck(
        lambda x, bias, a, b1, b2: fp4_linear(x, weight, bias, parts_of(a, b1, b2), dense), tensors
    )


@pytest.mark.parametrize("cached", [False, True])
def test_float32_gradients_equal_autograd_through_the_dense_product(cached):
    weight = packed_weight()
    dense = dequantize(weight)
    tensors = [
        t.float().requires_grad_()
        for t in (random(TOKENS, INPUTS, seed=4), random(OUTPUTS, seed=5), *adapter_tensors())
    ]
    upstream = random(TOKENS, OUTPUTS, seed=6, dtype=torch.float32)
    x, bias, *adapters = tensors
    ours = torch.autograd.grad(
        fp4_linear(x, weight, bias, parts_of(*adapters), dense if cached else None), tensors, upstream
    )
    theirs = torch.autograd.grad(dense_reference(x, dense, bias, *adapters), tensors, upstream)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_parts_with_their_own_a_equal_parts_that_share_a_stacked_one():
    weight, x = packed_weight(), random(TOKENS, INPUTS, seed=4)
    a, b_first, b_last = adapter_tensors()
    own = [
        AdapterPart(start=0, stop=6, a_RI=a[:RANK].clone(), b_OR=b_first, scale=0.5),
        AdapterPart(start=9, stop=13, a_RI=a[RANK:].clone(), b_OR=b_last, scale=2.0),
    ]
    torch.testing.assert_close(
        fp4_linear(x, weight, None, own), fp4_linear(x, weight, None, parts_of(a, b_first, b_last))
    )


@pytest.mark.parametrize("starts", [(0, 0), (RANK, 0), (0, RANK)])
def test_gradients_add_up_where_parts_read_the_same_ranks(starts):
    leaves = [random(TOKENS, INPUTS), *adapter_tensors()]
    weight, results = packed_weight(), []
    for packed in (True, False):
        x, a, b_first, b_last = tensors = [t.detach().clone().requires_grad_() for t in leaves]
        parts = [
            AdapterPart(start=0, stop=6, a_RI=a, b_OR=b_first, scale=0.5, rank_start=starts[0]),
            AdapterPart(start=9, stop=13, a_RI=a, b_OR=b_last, scale=2.0, rank_start=starts[1]),
        ]
        if packed:
            y = fp4_linear(x, weight, None, parts)
        else:
            own = [x @ a[start : start + RANK].T for start in starts]
            y = x @ dequantize(weight, torch.float64).T + torch.cat(
                [0.5 * own[0] @ b_first.T, x.new_zeros(TOKENS, 3), 2.0 * own[1] @ b_last.T], dim=1
            )
        results.append(torch.autograd.grad(y, tensors, random(TOKENS, OUTPUTS, seed=7)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_a_zero_b_changes_no_bit():
    weight, x = packed_weight(), random(TOKENS, INPUTS, seed=4, dtype=torch.float32)
    a, b_first, b_last = (t.float() for t in adapter_tensors())
    parts = parts_of(a, torch.zeros_like(b_first), torch.zeros_like(b_last))
    assert torch.equal(fp4_linear(x, weight, None, parts), fp4_linear(x, weight))


def test_each_segment_uses_its_own_global_scale():
    nvfp4 = get_format("nvfp4")
    weights = [scale * random(rows, INPUTS, seed=rows) for rows, scale in ((4, 1.0), (3, 29.0))]
    parts = [nvfp4.quantize(w) for w in weights]
    x = random(TOKENS, INPUTS, seed=9)
    joined = fp4_linear(x, nvfp4.join(parts))
    torch.testing.assert_close(joined, torch.cat([fp4_linear(x, part) for part in parts], dim=1))


def test_bfloat16_rounds_the_output_once_and_no_weight():
    weight = packed_weight()
    x = random(64, INPUTS, seed=4, dtype=torch.bfloat16)
    exact = x.double() @ dequantize(weight, torch.float64).T
    y = fp4_linear(x, weight)
    assert y.dtype == torch.bfloat16
    # Half a unit in the eighth and last bit, and a little for float32 sums.
    assert ((y.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-5).all()
    assert (y == exact.bfloat16()).double().mean() > 0.99


def test_bfloat16_gradients_stay_near_float64():
    weight = packed_weight()
    tensors = [
        t.bfloat16().requires_grad_()
        for t in (random(TOKENS, INPUTS, seed=4), random(OUTPUTS, seed=5), *adapter_tensors())
    ]
    wide = [t.detach().double().requires_grad_() for t in tensors]
    grads = []
    for x, bias, *adapters in (tensors, wide):
        y = fp4_linear(x, weight, bias, parts_of(*adapters))
        grads.append(torch.autograd.grad(y.double().square().sum(), (x, bias, *adapters)))
    for ours, exact in zip(*grads, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - exact).norm() <= 0.02 * exact.norm()


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_every_format_has_bfloat16_gradients(name):
    x, grad = (random(TOKENS, width, seed=7, dtype=torch.bfloat16) for width in (INPUTS, OUTPUTS))
    x.requires_grad_()
    weight = packed_weight(name)
    fp4_linear(x, weight).backward(grad)
    exact = grad.double() @ dequantize(weight, torch.float64)
    assert x.grad.dtype == torch.bfloat16
    assert (x.grad.double() - exact).norm() < 4e-3 * exact.norm()


def test_without_an_output_only_what_the_backward_pass_reads_is_made(monkeypatch):
    leaves = [random(TOKENS, INPUTS), *adapter_tensors()]
    weight, results = packed_weight(), []
    for output in (True, False):
        tensors = [t.detach().clone().requires_grad_() for t in leaves]
        y = fp4_linear(tensors[0], weight, None, parts_of(*tensors[1:]), output=output)
        assert y.isnan().all() == (not output)
        results.append(torch.autograd.grad(y, tensors, torch.ones_like(y)))
        monkeypatch.setattr(reference, "forward", None)
    assert all(torch.equal(first, again) for first, again in zip(*results, strict=True))


def test_no_dense_weight_is_kept_for_the_backward_pass():
    weight = packed_weight()
    kept = []
    x = random(TOKENS, INPUTS, seed=4, dtype=torch.float32).requires_grad_()
    adapters = [t.float().requires_grad_() for t in adapter_tensors()]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = fp4_linear(x, weight, random(OUTPUTS, dtype=torch.float32), parts_of(*adapters))
    shapes = sorted(tuple(t.shape) for t in kept)
    assert shapes == sorted([(TOKENS, INPUTS), (2 * RANK, INPUTS), (6, RANK), (4, RANK), (TOKENS, 2 * RANK)])
    held = [value for value in vars(y.grad_fn).values() if isinstance(value, torch.Tensor)]
    assert held == []
    assert y.grad_fn.weight is weight, "the packed bytes are held by reference"


def test_without_training_adapters_not_even_the_input_is_kept():
    kept = []
    x = random(TOKENS, INPUTS, seed=4, dtype=torch.float32).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fp4_linear(x, packed_weight()).sum().backward()
    assert kept == []
    assert x.grad is not None


def test_the_gate_passes_what_is_sound():
    for name in FORMAT_NAMES:
        weight = packed_weight(name)
        for dtype in (torch.float32, torch.bfloat16):
            layout_gate(weight, "m", dtype=dtype)
            layout_gate(weight, "m", dtype=dtype, dense_OI=dequantize(weight, dtype))


def test_the_gate_looks_at_outputs_of_the_type_that_is_used():
    """Sums that are not rounded are nearer to float64 than their rounding to bfloat16 alone."""
    rounded, wide = (
        layout_gate(packed_weight("nvfp4"), "m", dtype=torch.bfloat16, output_dtype=dtype)
        for dtype in (None, torch.float32)
    )
    assert wide < 1e-6 < 1e-4 < rounded


def swapped_nibbles(t):
    return {**t, "packed": (t["packed"] >> 4) | (t["packed"] << 4)}


def shifted_scales(t):
    return {**t, "block_scales": t["block_scales"].view(torch.uint8).roll(1, 1).view(torch.float8_e4m3fn)}


def shifted_absmax(t):
    return {**t, "absmax": t["absmax"].roll(1)}


def shifted_exponents(t):
    return {**t, "block_scales": t["block_scales"] + 1}


def inverted_global_scale(t):
    return {**t, "global_scale": 1 / t["global_scale"]}


def rotated_rows(t):
    return {**t, "packed": t["packed"].roll(1, 0)}


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *(("nvfp4", fault) for fault in (swapped_nibbles, shifted_scales, inverted_global_scale, rotated_rows)),
        *(("mxfp4", fault) for fault in (swapped_nibbles, shifted_exponents, rotated_rows)),
        *(("nf4", fault) for fault in (swapped_nibbles, shifted_absmax)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gate_stops_a_kernel_that_reads_another_layout(name, fault, dtype):
    """A dense copy made from misread bytes stands for a kernel that misreads them."""
    weight = get_format(name).quantize(random(96, 256, dtype=torch.float32))
    misread = dequantize(replace(weight, tensors=fault(weight.tensors)), dtype)
    with pytest.raises(LayoutGateError, match=rf"layers\.3\.mlp\.down_proj.*reference.*{name}.*row"):
        layout_gate(weight, "layers.3.mlp.down_proj", dtype=dtype, dense_OI=misread)


def test_the_gate_stops_on_nan():
    weight = packed_weight()
    with pytest.raises(LayoutGateError, match="inf"):
        layout_gate(weight, "m", dense_OI=torch.full((OUTPUTS, INPUTS), torch.nan))

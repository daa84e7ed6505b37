"""Products in plain torch: oneDNN's for large float32 weights on a CPU, torch's own otherwise. Legend: T tokens, I inputs, O output rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from qerl.kernels import product as module
from qerl.kernels.product import LARGE_WEIGHT, product

LARGE, SMALL = (700, 400), (64, 48)
"""[O, I] of a weight for oneDNN, and of one for `linear`."""


def operands(tokens: int, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    rows, width = shape
    x_TI, weight_OI = (torch.randn(n, width, generator=generator, dtype=dtype) for n in (tokens, rows))
    return x_TI, weight_OI, torch.randn(rows, generator=generator, dtype=dtype)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the weights that oneDNN is asked for, on any processor."""
    asked: list[tuple[int, ...]] = []

    def onednn(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, *_: object) -> Tensor:
        asked.append(tuple(weight_OI.shape))
        return linear(x_TI, weight_OI, bias_O)

    monkeypatch.setattr(module, "_onednn", lambda: onednn)
    return asked


@pytest.mark.parametrize("tokens", [0, 1, 2, 8, 17, 33])
@pytest.mark.parametrize("biased", [False, True])
@torch.no_grad()
def test_the_sums_are_those_of_float64_within_roundings_of_float32(tokens: int, biased: bool) -> None:
    x_TI, weight_OI, bias_O = operands(tokens, LARGE)
    y_TO = product(x_TI, weight_OI, bias_O if biased else None)
    exact_TO = x_TI.double() @ weight_OI.double().T + (bias_O if biased else 0.0)
    # n roundings of partial sums, each at most half a unit of a sum of sizes; their signs differ, so a root of n is generous.
    bound_TO = 2**-24 * 2 * LARGE[1] ** 0.5 * (x_TI.abs().double() @ weight_OI.abs().double().T + 1)
    assert y_TO.dtype == torch.float32 and y_TO.shape == exact_TO.shape
    assert ((y_TO - exact_TO).abs() <= bound_TO).all()


@torch.no_grad()
def test_a_row_has_the_same_bits_beside_any_other_rows() -> None:
    x_TI, weight_OI, _ = operands(13, LARGE)
    others_TI = torch.randn_like(x_TI)
    others_TI[3] = x_TI[11]
    y_TO = product(x_TI, weight_OI)
    assert torch.equal(product(others_TI, weight_OI)[3], y_TO[11])
    order_T = torch.randperm(13)
    assert torch.equal(product(x_TI[order_T], weight_OI), y_TO[order_T])


@torch.no_grad()
def test_rows_that_are_not_contiguous_are_read_as_they_lie() -> None:
    x_TI, weight_OI, bias_O = operands(9, LARGE)
    wide = torch.randn(9, 500)
    wide[:, 50:450] = x_TI
    weights = torch.randn(700, 403)
    weights[:, 3:] = weight_OI
    torch.testing.assert_close(product(wide[:, 50:450], weights[:, 3:], bias_O), product(x_TI, weight_OI, bias_O))
    turned_TI = x_TI.T.contiguous().T
    torch.testing.assert_close(product(turned_TI, weight_OI, bias_O), product(x_TI, weight_OI, bias_O))


def test_gradients_are_those_of_linear() -> None:
    x_TI, weight_OI, bias_O = (operand.requires_grad_() for operand in operands(5, LARGE))
    grad_TO = torch.randn(5, 700)
    product(x_TI, weight_OI, bias_O).backward(grad_TO)
    assert x_TI.grad is not None and weight_OI.grad is not None and bias_O.grad is not None
    torch.testing.assert_close(x_TI.grad, grad_TO @ weight_OI.detach())
    torch.testing.assert_close(weight_OI.grad, grad_TO.T @ x_TI.detach())
    torch.testing.assert_close(bias_O.grad, grad_TO.sum(0))


def test_onednn_multiplies_large_float32_weights_alone_and_where_no_gradient_is_recorded(
    calls: list[tuple[int, ...]],
) -> None:
    assert SMALL[0] * SMALL[1] < LARGE_WEIGHT <= LARGE[0] * LARGE[1]
    product(*operands(3, LARGE))
    with torch.no_grad():
        product(*operands(3, SMALL))
        for dtype in (torch.bfloat16, torch.float64):
            product(*operands(3, LARGE, dtype))
        assert not calls
        product(*operands(3, LARGE))
    assert calls == [LARGE]


def test_without_onednn_the_bits_are_those_of_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_onednn", lambda: None)
    x_TI, weight_OI, bias_O = operands(4, LARGE)
    with torch.no_grad():
        assert torch.equal(product(x_TI, weight_OI, bias_O), linear(x_TI, weight_OI, bias_O))

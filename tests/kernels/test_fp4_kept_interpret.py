"""The kernel that reads kept values, in the interpreter, against float64: every way to cut a product, every place of an adapter.

Values are numbers of bfloat16 in float32, since the interpreter has no products of bfloat16; and it cuts numbers off where a device rounds them to it.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton_cpu  # noqa: F401 - prepares the interpreter, before any kernel module

from qerl.formats import PackedWeight
from qerl.kernels.fp4_linear import AdapterPart, kept
from qerl.kernels.fp4_linear.adapter import flatten
from qerl.kernels.fp4_linear.kept import NO_ADAPTER, Piece, Shape, pieces_of

pytestmark = pytest.mark.interpret

ALPHAS = (0.5, 0.03, 7.0)


@pytest.fixture
def counters(monkeypatch):
    """Those of the device, whose workspace a CPU does not have."""
    zeros = torch.zeros(1 << 14, dtype=torch.int32)
    monkeypatch.setattr(kept, "workspace", lambda device: SimpleNamespace(counters=lambda: zeros))
    return zeros


def numbers(generator, *shape, scale=1.0):
    return (scale * torch.randn(*shape, generator=generator)).bfloat16().float()


def case(segments, d_in, rank, members, tokens):
    """(x, values, bias, weight, parts)."""
    generator = torch.Generator().manual_seed(0)
    d_out, stops = sum(segments), [sum(segments[: i + 1]) for i in range(len(segments))]
    a = numbers(generator, len(members) * rank, d_in, scale=d_in**-0.5)
    parts = [
        AdapterPart(
            start=stops[i] - segments[i],
            stop=stops[i],
            a_RI=a,
            b_OR=numbers(generator, segments[i], rank),
            scale=(1.5, 0.25, 3.0)[i],
            rank_start=index * rank,
        )
        for index, i in enumerate(members)
    ]
    values = numbers(generator, d_out, d_in)
    weight = PackedWeight(format="nvfp4", shape=values.shape, tensors={"values": values}, segments=segments)
    return numbers(generator, tokens, d_in), values, numbers(generator, d_out), weight, parts


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("segments", "d_in", "rank", "members", "tokens"),
    [
        ((64, 32, 32), 192, 32, (0, 1, 2), 40),
        ((64, 32, 32), 136, 8, (0, 2), 5),
        ((64, 32, 32), 136, 8, (1,), 16),
        ((50,), 72, 20, (0,), 33),
        ((50,), 72, 0, (), 17),
        ((64, 64), 64, 16, (), 3),
        ((64, 32, 32), 136, 32, (0, 1, 2), 1),
    ],
)
def test_products_agree_with_float64(counters, segments, d_in, rank, members, tokens, splits):
    x, values, bias, weight, parts = case(segments, d_in, rank, members, tokens)
    placements, a, b = flatten(parts)
    alphas = ALPHAS[: len(segments)]
    pieces = pieces_of(weight.segments, placements, alphas)
    exact = x.double() @ values.double().T
    exact *= torch.cat([torch.full((n,), alpha).double() for n, alpha in zip(segments, alphas, strict=True)])
    exact += bias.double()
    for part in parts:
        h = (x.double() @ part.a_RI[part.rank_start : part.rank_start + rank].double().T).float()
        cut = (h.view(torch.int32) & -65536).view(torch.float32).double()
        exact[:, part.start : part.stop] += part.scale * (cut @ part.b_OR.double().T)
    for shape in (Shape(16, 32, 64, 2, 4), Shape(32, 32, 32, 2, 4)):
        y = kept.run(*(x, values, bias, pieces, placements, a, b, replace(shape, splits=splits)), dtype=torch.float32)
        assert (y.double() - exact).norm() < 1e-4 * exact.norm()
    assert not counters.any(), "left as they were"


def test_one_row_is_read_whatever_torch_says_of_its_way_to_the_next(counters):
    x, values, _, weight, _ = case((64,), 72, 0, (), 1)
    odd = x.as_strided((1, 72), (1, 1))
    pieces = pieces_of(weight.segments, (), (1.0,))
    y = [
        kept.run(one, values, None, pieces, (), [], [], Shape(16, 32, 64, 2, 4), dtype=torch.float32)
        for one in (x, odd)
    ]
    assert torch.equal(*y) and y[0].any()


def test_pieces_end_where_the_divisor_or_the_adapter_changes():
    *_, weight, parts = case((64, 32, 32), 64, 8, (0, 2), 1)
    placements, _, _ = flatten(parts)
    assert pieces_of(weight.segments, placements, (0.5, 0.5, 0.5)) == (
        Piece(64, 0.5, 0),
        Piece(96, 0.5, NO_ADAPTER),
        Piece(128, 0.5, 1),
    )
    assert pieces_of(weight.segments, (), (0.5, 0.5, 0.25)) == (
        Piece(96, 0.5, NO_ADAPTER),
        Piece(128, 0.25, NO_ADAPTER),
    )
    assert pieces_of(weight.segments, (*placements, placements[0]), (0.5, 0.5, 0.5)) is None, "two adapters of one row"

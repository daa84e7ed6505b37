"""An FP8 head in tiles, by the kernels of the packed linear layer, against float64: each code in each place, ragged and real shapes, rows of every
size, and outputs that held NaN before. Log-probs, gradients and graphs: `test_head_gpu.py`."""

from dataclasses import replace

import pytest
import torch
from fp4_builders import adapters_of, cuda

from qerl.formats import PackedWeight, dequantize, get_format
from qerl.formats.fp8 import TILED_ON
from qerl.kernels.fp4_linear import decode, dense, fp4_linear, keeps, middle, regimes
from qerl.kernels.fp4_linear.adapter import flatten
from qerl.kernels.fp4_linear.cuda import regime_of
from qerl.kernels.token_logprobs import head_logits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
    ),
]

FORMAT = get_format("fp8")
# Norms of rows; tensor cores cut off when they add, the more the longer the sum.
FLOAT32_SUMS, USUAL_WIDTH = 6.0e-6, 3584
ROWS_OF_X = (1, 5, 8, 9, 16, 17, 31, 33, 63, 64, 65, 96, 100, 128, 129, 200, 256, 257, 512, 600, 1000, 1024, 1025)
FEW_ROWS_OF_X = (1, 16, 40, 96, 200, 1025)
# Heads of Qwen2.5 0.5B and 7B, Llama-3, Mistral and SmolLM2, some cut to fewer rows, and odd ones.
HEADS = ((151936, 896), (152064, 3584), (128256, 2048), (32768, 5120), (49152, 576), (33801, 1024))
ODD = ((5003, 896), (1000, 104), (335, 136), (33, 130), (17, 16), (1, 64), (20, 52))


def random_head(d_out: int, d_in: int) -> PackedWeight:
    """Rows of very different sizes, one of zeros, and one whose divisor is the largest number."""
    values = cuda(d_out, d_in, scale=0.05).float()
    values *= torch.logspace(-6, 3, d_out, device="cuda")[torch.randperm(d_out, device="cuda"), None]
    if d_out > 2:
        values[d_out // 2] = 0
        values[d_out // 3] = torch.finfo(torch.float32).smallest_normal
    return FORMAT.quantize(values)


def every_code(d_out: int, d_in: int, turn: int = 0) -> PackedWeight:
    """All numbers of E4M3, subnormal ones, zeros of both signs and 448 among them, one after the other; divisors are powers of two."""
    numbers = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8, device="cuda")
    codes = numbers[(torch.arange(d_out * d_in, device="cuda") * 5 + turn) % 254].view(d_out, d_in)
    divisor = 2.0 ** (torch.arange(d_out, device="cuda") % 41 - 20)
    tensors = {"codes": codes.view(torch.float8_e4m3fn), "divisor": divisor}
    return PackedWeight(format="fp8", shape=(d_out, d_in), tensors=tensors, segments=(d_out,))


def check(logits: torch.Tensor, hidden: torch.Tensor, exact_VD: torch.Tensor, what: object) -> None:
    """Each row of the head by itself, since small rows would vanish beside large ones."""
    exact = hidden.double() @ exact_VD.T
    assert logits.dtype == torch.float32 and logits.shape == exact.shape
    assert logits.isfinite().all(), what
    off = (logits.double() - exact).abs()
    # A sum over k16 steps, each cut off at 2^-23 of the largest term at most.
    assert (off <= (2e-6 + hidden.shape[1] * 4e-9) * (hidden.double().abs() @ exact_VD.abs().T) + 1e-44).all(), what
    sizes, errors = exact.norm(dim=0), off.norm(dim=0)
    normal = sizes > 1e-30
    relative = errors[normal] / sizes[normal]
    if len(hidden) >= 64 and len(relative) >= 64:
        limit = FLOAT32_SUMS * max(1.0, hidden.shape[1] / USUAL_WIDTH)
        assert float(relative.square().mean().sqrt()) < limit, what


def by_kernel(hidden: torch.Tensor, tiled: PackedWeight) -> torch.Tensor:
    """Whatever the size of the head: that of the middle kernel's shapes too."""
    if len(hidden) <= regimes.DECODE_ROWS:
        return decode.product(hidden, tiled, None, (), (), (), dtype=torch.float32)
    return middle.product(hidden, tiled, None, (), (), (), dtype=torch.float32)[0]


@pytest.mark.parametrize("shape", [(254, 576), (1000, 896), (33, 104), (40_001, 128)])
def test_every_code_in_every_place_is_exact(shape):
    """Rows of the identity pick single weights: no rounding is left to hide behind. By decode, by the middle kernel in all its shapes, unpacked."""
    head = every_code(*shape)
    tiled, exact_VD = FORMAT.tiled(head), dequantize(head, torch.float64)
    values = torch.full((shape[0], shape[1] + 24), 7.0, dtype=torch.bfloat16, device="cuda")
    dense.dequantize_tiles(tiled, values)
    assert torch.equal(values[:, : shape[1]], head.tensors["codes"].bfloat16())
    assert (values[:, shape[1] :] == 7).all()
    eye = torch.eye(shape[1], dtype=torch.bfloat16, device="cuda")
    for count in (1, 8, 16, 17, 32, 33, 64, 96, 128, 192, 200, 256):
        for start in {0, 56, shape[1] - count}:
            picked = eye[max(start, 0) :][:count]
            logits = by_kernel(picked, tiled)
            assert torch.equal(logits.double(), picked.double() @ exact_VD.T), (count, start)


@pytest.mark.parametrize("turn", [0, 101])
def test_codes_of_one_size_are_not_lost_beside_others(turn):
    """Rows of subnormal codes alone, of the largest alone, and of all."""
    head = every_code(600, 896, turn)
    bytes_VD = head.tensors["codes"].view(torch.uint8)
    bytes_VD[0:200] = bytes_VD[0:200] & 0x87
    bytes_VD[200:300] = bytes_VD[200:300] & 0x80 | 0x7E
    bytes_VD[300:310] = bytes_VD[300:310] & 0x80
    tiled, exact_VD = FORMAT.tiled(head), dequantize(head, torch.float64)
    assert exact_VD[300:310].abs().max() == 0
    for count in ROWS_OF_X:
        hidden = cuda(count, 896, seed=count)
        check(head_logits(hidden, tiled), hidden, exact_VD, count)


@pytest.mark.parametrize("shape", [*HEADS, *ODD], ids=str)
def test_logits_of_any_number_of_tokens(shape):
    head = random_head(*shape)
    tiled, large = FORMAT.tiled(head), shape[0] * shape[1] > 3e7
    exact_VD = dequantize(head, torch.float64)
    for count in FEW_ROWS_OF_X if large else ROWS_OF_X:
        hidden, other = cuda(count, shape[1], seed=count), cuda(count, shape[1], seed=count + 1)
        other[-1] = hidden[-1]
        logits = head_logits(hidden, tiled)
        check(logits, hidden, exact_VD, count)
        assert torch.equal(logits, head_logits(hidden, tiled)), f"{count}: same input, same bits"
        if regime_of(hidden, tiled, (), (), (), head=True) != regimes.DENSE:
            assert torch.equal(logits[-1], head_logits(other, tiled)[-1]), f"{count}: a row depends on others"
        if count <= 64:
            assert decode.takes(hidden, tiled, (), (), ())
        if shape[1] % 8 == 0:
            assert middle.takes(hidden, tiled, (), (), ())


def test_the_table_of_regimes_holds_for_these_tiles():
    head = FORMAT.tiled(random_head(40_000, 896))
    found = {count: regime_of(cuda(count, 896), head, (), (), (), head=True) for count in (1, 8, 9, 256, 1024, 1025)}
    assert list(found.values()) == [regimes.DECODE] * 2 + [regimes.MIDDLE] * 3 + [regimes.DENSE]


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("tiles", [1, 2])
@pytest.mark.parametrize("blocks", [4, 12, 36, 64, 100, 120])
def test_tiles_may_be_shared_in_any_way(monkeypatch, blocks, tiles, cluster):
    """Divisors of rows are those of the tile that a block has, wherever its run of steps begins and ends."""
    head = random_head(1600, 1088)
    tiled, exact_VD, choose = FORMAT.tiled(head), dequantize(head, torch.float64), middle.choose

    def chosen(*arguments):
        shape = replace(choose(*arguments), tiles=tiles, cluster=cluster, stages=0, blocks=0)
        return replace(middle.with_blocks(shape, *arguments[:4]), blocks=blocks)

    monkeypatch.setattr(middle, "choose", chosen)
    for count in (40, 120 if tiles == 2 else 200):
        hidden = cuda(count, 1088, seed=count)
        logits = middle.product(hidden, tiled, None, (), (), (), dtype=torch.float32)[0]
        check(logits, hidden, exact_VD, count)


@pytest.mark.parametrize("shape", [(5003, 896), (335, 136), (40_001, 576)])
def test_every_logit_is_written(shape, monkeypatch):
    """New memory holds NaN, that of partial sums too."""
    empty, head = torch.empty, random_head(*shape)
    tiled, exact_VD = FORMAT.tiled(head), dequantize(head, torch.float64)
    for count in (1, 9, 30, 64, 100, 200, 1100):
        hidden = cuda(count, shape[1])
        with monkeypatch.context() as patched:
            patched.setattr(torch, "empty", lambda *args, **options: empty(*args, **options).fill_(torch.nan))
            logits = head_logits(hidden, tiled)
        check(logits, hidden, exact_VD, count)


def test_the_kernel_of_the_natural_order_gives_the_same_logits():
    head = FORMAT.quantize(cuda(5003, 896, scale=0.05))
    tiled = FORMAT.tiled(head)
    for count in (1, 16, 64, 100, 256, 600):
        hidden = cuda(count, 896, seed=count)
        ours, theirs = head_logits(hidden, tiled), head_logits(hidden, head)
        assert float((ours - theirs).norm() / theirs.norm()) < FLOAT32_SUMS


def test_as_a_layer_it_is_left_to_the_plain_products():
    """Its divisors are of rows, which cuBLAS has no place for, and its kernels keep no room for adapters."""
    head, x = FORMAT.quantize(cuda(300, 136, scale=0.05)), cuda(40, 136, seed=3)
    tiled, parts = FORMAT.tiled(head), adapters_of((300,), 136, 8)
    assert not middle.takes(x, tiled, *flatten(parts))
    assert not keeps(tiled, torch.bfloat16)
    with torch.no_grad():
        for given in ((), parts):
            assert torch.equal(fp4_linear(x, tiled, None, given), fp4_linear(x, head, None, given))


def test_a_head_comes_back_byte_for_byte_and_has_its_default_order():
    head = random_head(1000, 328)
    back = FORMAT.natural(FORMAT.tiled(head))
    for key, tensor in head.tensors.items():
        assert torch.equal(back.tensors[key].view(torch.uint8), tensor.view(torch.uint8))
    default = "tiles" if torch.cuda.get_device_capability() in TILED_ON else "natural"
    assert FORMAT.for_device(head).order == default

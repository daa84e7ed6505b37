"""After everything was compiled ahead, products of any number of rows load no kernel: none in CUDA C++ and none of Triton's."""

import pytest
import torch
from fp4_builders import adapters_of, cuda
from test_fp4_formats_gpu import weight_of

from qerl.formats import get_format
from qerl.kernels.fp4_linear import Layer, compile_ahead, fp4_linear, keep, kept
from qerl.kernels.fp4_linear.workspace import compiled

pytestmark = pytest.mark.gpu

ROWS = (
    1,
    7,
    16,
    17,
    33,
    63,
    64,
    65,
    100,
    129,
    200,
    257,
    300,
    500,
    777,
    1024,
    1025,
    1500,
    2048,
    2049,
    3000,
    4096,
    4097,
    8192,
    8193,
)
# Of a 0.5B, o and down with the float32 outputs that its stream takes; and a large weight, which is never kept.
CASES = (
    ((896, 128, 128), 896, torch.bfloat16, True),
    ((896,), 4864, torch.float32, True),
    ((896, 128, 128), 896, torch.bfloat16, False),
    ((3584,), 3584, torch.float32, False),
)


def loaded() -> tuple[int, int]:
    """Kernels so far: in CUDA C++, and of kept values."""
    found = kept._product.device_caches.get(torch.cuda.current_device())
    return compiled.cache_info().misses, 0 if found is None else len(found[0])


@pytest.mark.parametrize(("segments", "d_in", "dtype", "keeps"), CASES)
def test_products_of_any_number_of_rows_load_nothing_more(segments, d_in, dtype, keeps):
    held = get_format("nvfp4").for_device(weight_of("nvfp4", segments, d_in))
    weight, parts = keep(held) if keeps else held, adapters_of(segments, d_in, 32)
    compile_ahead([Layer(weight=weight, bias_O=None, adapters=parts, dense_OI=None, dtype=dtype)], 8192)
    before = loaded()
    for rows in ROWS:
        x = cuda(rows, d_in).requires_grad_()
        y = fp4_linear(x, weight, None, parts, dtype=dtype)
        assert torch.isfinite(y).all()
        y.sum().backward()
        assert loaded() == before, rows

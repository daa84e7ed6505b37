"""Ragged numbers of rows of every projection of all published sizes (`fp4_builders.PUBLISHED`), on a CUDA device, against float64."""

import pytest
import torch
from fp4_builders import adapters_of, cuda, exact_product, projections
from test_fp4_linear_gpu import FORMAT, LARGE_REGIME, ONE_ROUNDING, error, once, weight_of

from qerl.formats import dequantize
from qerl.kernels.fp4_linear import fp4_linear

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("segments", "d_in"), projections())
def test_ragged_rows_agree_with_float64(segments, d_in):
    weight = weight_of(segments, d_in)
    dense_OI, tiled = dequantize(weight, torch.float64), FORMAT.for_device(weight)
    parts, bias = adapters_of(segments, d_in, 32), cuda(sum(segments), seed=9)
    for rows in (1, 3, 17, 63, 1000):
        x = cuda(rows, d_in, seed=rows)
        with torch.no_grad():
            y = fp4_linear(x, tiled, bias, parts)
        limit = (ONE_ROUNDING if once(x, tiled, parts) else LARGE_REGIME) * (1 + 3 / y.numel() ** 0.5)
        assert error(y, exact_product(x, dense_OI, bias, parts)) < limit, rows

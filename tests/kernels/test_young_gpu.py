"""Young adapters in outputs of bfloat16 (`young`): of every regime, on average, all that they add is there."""

import pytest
import torch
from young import positive, share_kept

from qerl.formats import dequantize, get_format
from qerl.kernels.fp4_linear import fp4_linear, keep, regimes
from qerl.kernels.fp4_linear.adapter import flatten
from qerl.kernels.fp4_linear.cuda import regime_of

pytestmark = pytest.mark.gpu

ON_HOPPER = pytest.mark.skipif("torch.cuda.get_device_capability() != (9, 0)", reason="kernels of sm_90")
ROWS = (8, 100, 2500, 5000, 9000)
SMALL, GATE_UP, BIG = ((896, 128, 128), 896), ((4864, 4864), 896), ((3584, 512, 512), 3584)
DECODE, MIDDLE, KEPT, DENSE = regimes.DECODE, regimes.MIDDLE, regimes.KEPT, regimes.DENSE
# (format, (segments, inputs), whether V is kept) -> the regime of each number of rows.
WEIGHTS = {
    ("nvfp4", SMALL, False): (DECODE, MIDDLE, DENSE, DENSE, DENSE),
    ("nvfp4", SMALL, True): (DECODE, KEPT, DENSE, DENSE, DENSE),
    ("nvfp4", GATE_UP, False): (DECODE, MIDDLE, DENSE, DENSE, DENSE),
    ("nvfp4", GATE_UP, True): (DECODE, KEPT, DENSE, DENSE, DENSE),
    ("nvfp4", BIG, False): (DECODE, MIDDLE, MIDDLE, MIDDLE, DENSE),
    ("bf16", SMALL, True): (KEPT, KEPT, DENSE, DENSE, DENSE),
    ("bf16", GATE_UP, True): (KEPT, KEPT, DENSE, DENSE, DENSE),
}


@ON_HOPPER
@pytest.mark.parametrize(("name", "shape", "is_kept"), WEIGHTS)
@pytest.mark.parametrize("biased", [False, True])
def test_young_adapters_are_in_the_outputs_of_every_regime(name, shape, is_kept, biased):
    (segments, d_in), fmt = shape, get_format(name)
    natural = fmt.quantize(positive(sum(segments), d_in, "cuda"), segments=segments)
    values_OI = dequantize(natural, torch.float64)
    weight = fmt.for_device(natural)
    weight = keep(weight) if is_kept else weight
    for rows, regime in zip(ROWS, WEIGHTS[name, shape, is_kept], strict=True):

        def multiplied(x, bias, parts, regime=regime):
            if parts:
                assert regime_of(x, weight, *flatten(parts)) == regime
            with torch.no_grad():
                return fp4_linear(x, weight, bias, parts)

        share = share_kept(multiplied, values_OI, segments, rows, biased=biased, rank=32)
        assert 0.9 < share < 1.1, f"{rows} rows: {share:.3f}"

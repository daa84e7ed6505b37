"""What a linear layer holds beside its weight, and its products with that."""

import pytest
import torch
from tiny_models import load_tiny, randomize_adapters, write_tiny

from qerl.config.schema import LoraConfig, QuantConfig
from qerl.formats import get_format
from qerl.kernels import fp4_linear
from qerl.kernels.fp4_linear.regimes import SMALL_WEIGHT
from qerl.model.linear import with_copy


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Weights are held as where the CUDA kernels multiply in bfloat16; what multiplies here reads the stored tensors."""
    monkeypatch.setattr(fp4_linear, "served", lambda device, dtype: dtype == torch.bfloat16)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("keep_dense", [False, True])
def test_kernels_read_small_unquantized_weights_and_all_others_are_their_own_copy(keep_dense):
    def unquantized(numbers):
        return get_format("bf16").quantize(torch.ones(numbers // 1000, 1000, dtype=torch.bfloat16))

    small, large = unquantized(SMALL_WEIGHT - 1000), unquantized(SMALL_WEIGHT)
    held, dense_OI = with_copy(small, torch.bfloat16, keep_dense=keep_dense)
    assert held.kept_OI is small.tensors["weight"] and dense_OI is None
    others = ((small, torch.float32, True), (small, torch.bfloat16, False), (large, torch.bfloat16, True))
    for weight, dtype, reads in others:
        held, dense_OI = with_copy(weight, dtype, keep_dense=keep_dense, kernel_reads_plain=reads)
        assert held.kept_OI is None and dense_OI is weight.tensors["weight"]


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("dense_cache", ["auto", "on", "off"])
def test_a_member_of_an_unquantized_weight_is_its_product_whoever_reads_it(tmp_path, dense_cache):
    write_tiny(tmp_path, "qwen2-tied")
    quant = QuantConfig(format="bf16", dense_cache=dense_cache)
    model = load_tiny(tmp_path, quant=quant, lora=LoraConfig(rank=4), dtype=torch.bfloat16)
    randomize_adapters(model)
    for linear in model.grouped_linears():
        assert (linear.weight.kept_OI is None) == (linear.dense_OI is not None) == (dense_cache == "off")
        weight_OI = linear.weight.tensors["weight"].double()
        x = torch.randn(5, weight_OI.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
        exact = x.double() @ weight_OI.T
        if linear.bias_O is not None:
            exact += linear.bias_O.double()
        for part in linear.lora.adapter_parts(torch.bfloat16):
            a_RI = part.a_RI[part.rank_start : part.rank_start + part.b_OR.shape[1]].double()
            exact[:, part.start : part.stop] += part.scale * (x.double() @ a_RI.T) @ part.b_OR.double().T
        for name in linear.parts:
            start, stop = linear.rows_of(name)
            error = linear.member(name, x).double() - exact[:, start:stop]
            assert error.norm() < 6e-3 * exact[:, start:stop].norm(), name


@pytest.mark.usefixtures("as_on_a_gpu")
def test_weights_that_train_are_read_by_no_kernel(tmp_path):
    write_tiny(tmp_path, "qwen2-tied")
    model = load_tiny(tmp_path, quant=QuantConfig(format="bf16"), dtype=torch.bfloat16, full=True)
    assert all(linear.weight.kept_OI is None for linear in model.grouped_linears())

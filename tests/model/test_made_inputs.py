"""Layers hand a product what its input is made of, where a kernel makes it: the outputs are those of the input by itself."""

import pytest
import torch
from tiny_models import load_tiny, pack, random_tokens, randomize_adapters, write_tiny

from qerl.config.schema import LoraConfig
from qerl.kernels.activation import silu_mul
from qerl.kernels.fp4_linear import Gated, Normed, fp4_linear
from qerl.kernels.rms_norm import TableNoise, add_rms_norm
from qerl.model import linear
from qerl.model.aqn import NoiseState

SEQUENCES = random_tokens((9, 31, 2))


@pytest.fixture
def made(monkeypatch):
    """Kinds of what was made, by a stand-in for a kernel that makes everything."""
    kinds = []

    def make(x_TX, made, *product):
        kinds.append(type(made))
        if isinstance(made, Normed):
            h_TI, stream_TI = add_rms_norm(x_TX, made.residual_TI, made.weight_I, made.eps, made.z)
            made.stream_TI.copy_(stream_TI)
            return fp4_linear(h_TI, *product)
        return fp4_linear(silu_mul(x_TX), *product)

    monkeypatch.setattr(linear, "made_linear", make)
    return kinds


@pytest.mark.parametrize("variant", ["qwen2-tied", "qwen3-wide-heads"])
@pytest.mark.parametrize("scope", [None, "rollout"])
@pytest.mark.parametrize("adapters", [True, False])
def test_outputs_are_those_of_inputs_from_kernels_of_their_own(tmp_path, made, variant, scope, adapters):
    write_tiny(tmp_path, variant)
    model = load_tiny(tmp_path, lora=LoraConfig(rank=4, alpha=8.0))
    randomize_adapters(model)
    noise = None
    if scope is not None:
        sites = ("attn_norm", "mlp_norm", "final_norm")
        state = NoiseState(seed=1, rollout=2, stage=1, sigma=0.3, group_size=1, scope=scope, sites=sites)
        noise = state.materialize(model)
    tokens_T, context = pack(SEQUENCES)
    with torch.no_grad():
        found = model(tokens_T, context, noise=noise, adapters=adapters)
    assert made.count(Normed) == 2 * model.spec.num_layers
    assert made.count(Gated) == model.spec.num_layers
    made.clear()
    expected = model(tokens_T, context, noise=noise, adapters=adapters)
    assert not made, "gradients need the inputs themselves"
    assert torch.equal(found, expected)


def test_noise_that_a_product_does_not_read_is_left_to_the_norm(tmp_path, made):
    write_tiny(tmp_path, "qwen2-tied")
    layer = load_tiny(tmp_path).layers[0]
    x, residual = torch.randn(6, 64), torch.randn(6, 64)
    z_RD, rows = torch.randn(6, 64), torch.arange(6) // 2
    forms = {
        z_RD: 1,
        TableNoise(z_RD=z_RD): 1,
        TableNoise(z_RD=z_RD, rows_T=rows): 0,
        TableNoise(z_RD=z_RD, noisy_T=rows > 0): 0,
    }
    for noise, count in forms.items():
        with torch.no_grad():
            found = layer.qkv.normed(x, residual, layer.attn_norm, 1e-6, noise)
            assert len(made) == count
            h, stream = add_rms_norm(x, residual, layer.attn_norm, 1e-6, noise)
            assert torch.equal(found[0], layer.qkv.stacked(h))
        assert torch.equal(found[1], stream)
        made.clear()

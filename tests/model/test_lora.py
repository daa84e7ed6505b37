"""Adapters: the formula, the initialization, and what a target list may say."""

import pytest
import torch
from tiny_models import load_tiny, randomize_adapters, write_tiny

from qerl.config.schema import LoraConfig, QuantConfig
from qerl.errors import ConfigError
from qerl.formats import dequantize
from qerl.model.checkpoint import adapter_hash
from qerl.model.lora import LoraGroup, initial_a


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_tiny(path)
    return path


@pytest.mark.parametrize(
    "targets", [("q_proj",), ("q_proj", "v_proj", "up_proj"), ("k_proj", "gate_proj", "down_proj")]
)
@pytest.mark.parametrize("quant", [QuantConfig(format="bf16"), QuantConfig(dense_cache="off"), QuantConfig()])
def test_output_is_base_plus_scaled_low_rank_product(folder, targets, quant):
    model = load_tiny(folder, quant=quant, lora=LoraConfig(rank=4, alpha=6.0, targets=targets))
    randomize_adapters(model)
    for linear in model.layers[1].qkv, model.layers[1].gate_up, model.layers[1].down:
        x = torch.randn(7, linear.weight.shape[1], generator=torch.Generator().manual_seed(1))
        weight = dequantize(linear.weight, torch.float64)
        if linear.lora is not None:
            for name, (a, b) in linear.lora.matrices().items():
                start, stop = linear.rows_of(name.rsplit(".", 1)[1])
                weight[start:stop] += 6.0 / 4 * b.detach().double() @ a.detach().double()
        expected = x.double() @ weight.T + (0 if linear.bias_O is None else linear.bias_O.double())
        assert (linear.stacked(x).detach().double() - expected).abs().max() < 1e-5


def test_only_targeted_projections_carry_adapters(folder):
    model = load_tiny(folder, lora=LoraConfig(rank=2, targets=("v_proj", "down_proj")))
    layer = model.layers[0]
    assert list(layer.qkv.lora.matrices()) == ["layers.0.self_attn.v_proj"]
    assert layer.o.lora is None
    assert layer.gate_up.lora is None
    assert layer.down.lora.lora_a.shape == (2, 112)
    assert layer.down.lora.lora_a.dtype == torch.float32


def test_parameter_count_is_rank_times_both_widths(folder):
    model = load_tiny(folder, lora=LoraConfig(rank=4, targets=("o_proj",), train_norms=False))
    assert sum(p.numel() for p in model.trainable_parameters().values()) == 3 * 4 * (64 + 64)


def test_master_weights_are_float32_and_gradients_too_in_bfloat16_compute(folder):
    model = load_tiny(folder, dtype=torch.bfloat16, lora=LoraConfig(rank=4))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    outputs = model.layers[0].qkv(x)
    assert outputs[0].dtype == torch.bfloat16
    sum(output.float().square().sum() for output in outputs).backward()
    assert all(b.dtype == torch.float32 and b.grad.dtype == torch.float32 for b in model.layers[0].qkv.lora.lora_b)


def test_initial_a_is_keyed_by_name_and_uniform_in_pefts_bounds():
    a = initial_a("layers.3.mlp.down_proj", 32, 400, seed=1)
    assert a.shape == (32, 400)
    assert a.abs().max() < 1 / 20
    assert a.abs().max() > 0.999 / 20
    assert abs(float(a.mean())) < 4 / 20 / (3 * a.numel()) ** 0.5
    assert float(a.var()) == pytest.approx(1 / (3 * 400), rel=0.03)
    assert torch.equal(a, initial_a("layers.3.mlp.down_proj", 32, 400, seed=1))
    assert not torch.equal(a, initial_a("layers.4.mlp.down_proj", 32, 400, seed=1))
    assert not torch.equal(a, initial_a("layers.3.mlp.down_proj", 32, 400, seed=2))


def test_initialization_does_not_depend_on_what_else_is_targeted(folder):
    few = load_tiny(folder, lora=LoraConfig(rank=4, targets=("v_proj",)), seed=9)
    all_seven = load_tiny(folder, lora=LoraConfig(rank=4), seed=9)
    name = "layers.2.self_attn.v_proj"
    a_few, b_few = few.layers[2].qkv.lora.matrices()[name]
    assert torch.equal(a_few, all_seven.layers[2].qkv.lora.matrices()[name][0])
    assert not b_few.any()


def test_hash_follows_values_and_scale(folder):
    def fresh(**changes):
        return load_tiny(folder, lora=LoraConfig(**{"rank": 4, "alpha": 8.0, **changes}))

    assert adapter_hash(fresh()) == adapter_hash(fresh())
    assert adapter_hash(fresh()) != adapter_hash(fresh(alpha=4.0))
    changed = fresh()
    with torch.no_grad():
        changed.layers[2].down.lora.lora_b[0][5, 1] = 1e-30
    assert adapter_hash(changed) != adapter_hash(fresh())


def test_targets_that_match_nothing_are_refused(folder):
    with pytest.raises(ConfigError, match=r"lora\.targets matches nothing.*an empty list"):
        load_tiny(folder, lora=LoraConfig(targets=()))
    unknown = LoraConfig.model_construct(rank=4, alpha=4.0, targets=("c_attn",), train_norms=True)
    with pytest.raises(ConfigError, match="c_attn"):
        load_tiny(folder, lora=unknown)


def bfloat16_group() -> LoraGroup:
    group = LoraGroup(["q", "k"], [(0, 6), (6, 10)], 8, rank=2, alpha=4, seed=0)
    for index, b in enumerate(group.lora_b):
        b.data.copy_(torch.randn(b.shape, generator=torch.Generator().manual_seed(index)))
    return group


def test_copies_keep_their_place_and_follow_their_masters():
    """What a captured graph reads: the addresses never change, the values do."""
    group = bfloat16_group()
    with torch.no_grad():
        before = [t for part in group.adapter_parts(torch.bfloat16) for t in (part.a_RI, part.b_OR)]
        places = [t.data_ptr() for t in before]
        group.lora_a.mul_(3.0)
        group.lora_b[1].add_(1.0)
        stale = before[0].clone()
        group.refresh()
        assert not torch.equal(before[0], stale)
        after = [t for part in group.adapter_parts(torch.bfloat16) for t in (part.a_RI, part.b_OR)]
    assert [t.data_ptr() for t in after] == places
    assert torch.equal(after[0], group.lora_a.detach().bfloat16())
    assert torch.equal(after[3], group.lora_b[1].detach().bfloat16())


def test_an_update_that_torch_does_not_count_needs_a_forced_refresh():
    group = bfloat16_group()
    with torch.no_grad():
        copy = group.adapter_parts(torch.bfloat16)[0].a_RI
        group.lora_a.data.mul_(3.0)
        group.refresh(force=True)
    assert torch.equal(copy, group.lora_a.detach().bfloat16())


def test_gradients_reach_the_masters_through_the_copies():
    group = bfloat16_group()
    parts = group.adapter_parts(torch.bfloat16)
    assert parts[0].a_RI is parts[1].a_RI, "one stacked A, one product"
    (parts[0].a_RI.float().square().sum() + 2 * parts[1].b_OR.float().sum()).backward()
    assert group.lora_a.grad.dtype == torch.float32
    torch.testing.assert_close(group.lora_a.grad, 2 * group.lora_a.detach(), rtol=2**-7, atol=0)
    assert torch.equal(group.lora_b[1].grad, torch.full_like(group.lora_b[1], 2.0))
    assert group.lora_b[0].grad is None


def test_in_the_masters_own_type_there_is_no_copy():
    group = bfloat16_group()
    assert group.adapter_parts(torch.float32)[0].a_RI is group.lora_a


def test_a_step_between_forward_and_backward_is_noticed():
    """The backward pass would read adapters that were not those of the forward pass."""
    group = bfloat16_group()
    part = group.adapter_parts(torch.bfloat16)[0]
    y = (torch.ones(3, 8, dtype=torch.bfloat16, requires_grad=True) @ part.a_RI.T).sum()
    with torch.no_grad():
        group.lora_a.mul_(2.0)
    group.refresh()
    with pytest.raises(RuntimeError, match=r"modified.*inplace"):
        y.backward()

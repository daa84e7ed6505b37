"""Float32 masters of narrow weights, and the 8-bit optimizer."""

import sys
import weakref

import pytest
import torch

from qerl.config.schema import OptimConfig
from qerl.errors import MissingDependencyError
from qerl.memory.shapes import moment_bytes
from qerl.model.lora import LoraGroup
from qerl.train.optimizer import apply_update, make_optimizer

SHAPES = {"wide": (96, 64), "small": (8, 8), "scale": (64,)}


def parameters(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.nn.Parameter(
            torch.randn(shape, generator=generator).to(torch.float32 if name == "scale" else dtype)
        )
        for name, shape in SHAPES.items()
    }


def give_gradients(params, step, micro_batches=1):
    """Gradients through autograd, as a run makes them."""
    for index in range(micro_batches):
        generator = torch.Generator().manual_seed(100 * step + index)
        for parameter in params.values():
            (parameter.float() * torch.randn(parameter.shape, generator=generator)).sum().backward()


def train(params, optimizer, steps):
    for step in steps:
        give_gradients(params, step)
        apply_update(optimizer, 1e-3, 1e9)


def test_updates_smaller_than_a_rounding_add_up_in_the_master():
    """1 + 2^-8 is not a bfloat16: forty updates of 1e-3 move the weight only if something remembers them."""
    parameter = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = make_optimizer({"w": parameter}, OptimConfig(weight_decay=0.0))
    for _ in range(40):
        parameter.float().sum().backward()
        apply_update(optimizer, 1e-3, 1e9)
        (master,) = optimizer.masters.values()
        assert torch.equal(parameter, master.to(torch.bfloat16))
    assert parameter.max() < 0.97


def test_a_bfloat16_weight_follows_the_float32_trajectory():
    narrow, wide = parameters(torch.bfloat16), {}
    for name, parameter in narrow.items():
        wide[name] = torch.nn.Parameter(parameter.detach().float().clone())
    ours, reference = make_optimizer(narrow, OptimConfig()), make_optimizer(wide, OptimConfig())
    assert not reference.masters and len(ours.masters) == 2
    train(wide, reference, range(5))
    for step in range(5):
        give_gradients(narrow, step)
        assert all(parameter.grad is None for name, parameter in narrow.items() if name != "scale")
        apply_update(ours, 1e-3, 1e9)
    for name, parameter in narrow.items():
        master = ours.masters.get(parameter, parameter)
        # Gradients of a bfloat16 weight are rounded once; Adam's step is at most lr each.
        assert (master - wide[name]).abs().max() < 5 * 1e-3 * 2**-7, name


def test_gradients_of_micro_batches_are_added_in_float32():
    params = parameters(torch.bfloat16)
    optimizer = make_optimizer(params, OptimConfig())
    give_gradients(params, 1, micro_batches=64)
    exact = {}
    for name, parameter in params.items():
        exact[name] = torch.zeros(parameter.shape)
    for index in range(64):
        generator = torch.Generator().manual_seed(100 + index)
        for name, parameter in params.items():
            drawn = torch.randn(parameter.shape, generator=generator)
            exact[name] += drawn.to(parameter.dtype).float()
    for name, parameter in params.items():
        assert torch.equal(optimizer.masters.get(parameter, parameter).grad, exact[name]), name


@pytest.mark.parametrize("optimizer_name", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_twice_n_steps_are_n_and_resumed_n(optimizer_name, dtype, tmp_path):
    config = OptimConfig(name=optimizer_name)
    whole = parameters(dtype)
    train(whole, make_optimizer(whole, config), range(6))
    first = parameters(dtype)
    optimizer = make_optimizer(first, config)
    train(first, optimizer, range(3))
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    second = parameters(dtype, seed=5)
    with torch.no_grad():
        for name, parameter in second.items():
            parameter.copy_(first[name])
    resumed = make_optimizer(second, config)
    resumed.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    train(second, resumed, range(3, 6))
    for name, parameter in second.items():
        assert torch.equal(parameter, whole[name]), name


@pytest.mark.parametrize("optimizer_name", ["adamw", "adamw_8bit"])
def test_an_optimizer_goes_with_its_last_name_and_another_takes_its_parameters(optimizer_name):
    params, others = parameters(torch.bfloat16), parameters(torch.bfloat16)
    config = OptimConfig(name=optimizer_name)
    optimizer = make_optimizer(params, config)
    train(params, optimizer, range(2))
    held = [weakref.ref(one) for one in (optimizer, *optimizer.masters.values(), *optimizer.state_tensors())]
    del optimizer
    # The code books of bitsandbytes are the module's.
    assert all(one() is None for one in held[:3])
    with torch.no_grad():
        for name, parameter in params.items():
            others[name].copy_(parameter)
    again, fresh = make_optimizer(params, config), make_optimizer(others, config)
    train(params, again, range(2, 4))
    train(others, fresh, range(2, 4))
    for name, parameter in params.items():
        assert torch.equal(parameter, others[name]), name
    give_gradients(params, 9)
    assert params["wide"].grad is None
    del again
    give_gradients(params, 9)
    assert params["wide"].grad is not None, "nothing takes gradients away when no optimizer is there"


def test_a_state_of_other_weights_is_refused():
    state = make_optimizer(parameters(torch.bfloat16), OptimConfig()).state_dict()
    with pytest.raises(ValueError, match="master weights"):
        make_optimizer(parameters(torch.float32), OptimConfig()).load_state_dict(state)


def test_8_bit_moments_take_the_bytes_that_are_predicted_and_go_the_same_way():
    params, reference = parameters(torch.float32), parameters(torch.float32)
    optimizer = make_optimizer(params, OptimConfig(name="adamw_8bit"))
    plain = make_optimizer(reference, OptimConfig())
    train(params, optimizer, range(1))
    train(reference, plain, range(1))
    # The first step of Adam is the sign of the gradient: 8 bits change little of it.
    for name, parameter in params.items():
        assert (parameter - reference[name]).abs().mean() < 2e-5, name
    maps = 2 * 256 * 4  # the two code books of bitsandbytes, shared by all tensors
    distinct = {id(tensor): tensor for tensor in optimizer.state_tensors()}
    held = sum(tensor.numel() * tensor.element_size() for tensor in distinct.values())
    sizes = [torch.Size(shape).numel() for shape in SHAPES.values()]
    assert held == maps + sum(moment_bytes(size, "adamw_8bit") for size in sizes)
    assert moment_bytes(96 * 64, "adamw_8bit") == 2 * (6144 + 4 * 24)
    assert sum(t.numel() * t.element_size() for t in plain.state_tensors()) == sum(
        moment_bytes(size, "adamw") for size in sizes
    )


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(MissingDependencyError, match="pip install bitsandbytes"):
        make_optimizer(parameters(torch.float32), OptimConfig(name="adamw_8bit"))


@pytest.mark.parametrize("optimizer_name", ["adamw", "adamw_8bit"])
def test_copies_in_the_compute_type_know_that_a_master_has_changed(optimizer_name):
    """bitsandbytes writes through raw pointers; what the kernels read must follow all the same."""
    group = LoraGroup(["q"], [(0, 96)], 64, rank=64, alpha=1.0, seed=0)
    masters = dict(group.named_parameters())
    optimizer = make_optimizer(masters, OptimConfig(name=optimizer_name))
    before = group.adapter_parts(torch.bfloat16)[0].a_RI.detach().clone()
    for _ in range(2):
        for master in masters.values():
            master.grad = torch.ones_like(master)
        apply_update(optimizer, 1e-2, 1e9)
        (part,) = group.adapter_parts(torch.bfloat16)
        assert torch.equal(part.a_RI, group.lora_a.to(torch.bfloat16))
        assert torch.equal(part.b_OR, group.lora_b[0].to(torch.bfloat16))
    assert not torch.equal(before, part.a_RI)

"""Covariance of output perturbations against its closed form, C_ab = W_a diag(u^2 s^2) W_b^T."""

import pytest
import torch
from rollout_builders import load_tiny, make_prompts, write_checkpoint

from qerl.formats import get_format
from qerl.metrics.catalogue import lookup
from qerl.model.aqn import NoiseState
from qerl.model.linear import GroupedLinear
from qerl.records import Completion
from qerl.train.diagnostics.passes import pack_answers
from qerl.train.diagnostics.perturbation import perturbation_metrics, projection_statistics, squared_norm

SIGMA = 0.1


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_tiny(write_checkpoint(tmp_path_factory.mktemp("model"), "qwen2"))


@pytest.fixture(scope="module")
def batch(model):
    completions = [
        Completion(
            prompt=prompt,
            sample_key=4 * index,
            token_ids=(7, 8, 9, 10),
            text="",
            behavior_logprobs=(0.0,) * 4,
            sampler_logprobs=(0.0,) * 4,
            stop_reason="stop",
        )
        for index, prompt in enumerate(make_prompts([3, 5]))
    ]
    (packed,) = pack_answers(completions, 256, model.device)
    return packed


def toy(rows=(3, 3, 4), width=6):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(sum(rows), width, generator=generator)
    packed = get_format("bf16").quantize(weight, segments=rows)
    linear = GroupedLinear("toy", ("q_proj", "k_proj", "v_proj"), rows, packed, dense_OI=weight)
    return linear, weight, torch.randn(5, width, generator=generator)


def closed_form(weight, rows, u_TD):
    """RV coefficients and mean squares of the perturbations of all pairs of members, token by token."""
    parts = dict(zip("qkv", weight.double().split(rows), strict=True))
    scale_TD = (u_TD.double() * SIGMA) ** 2

    def norm(a, b):
        return torch.stack([((parts[a] * s_D) @ parts[b].T).pow(2).sum() for s_D in scale_TD]).mean()

    dependence = {f"{a}_{b}": float(norm(a, b) / (norm(a, a) * norm(b, b)).sqrt()) for a, b in ("qk", "qv", "kv")}
    sizes = {name: float((scale_TD @ w.pow(2).T).mean().sqrt()) for name, w in parts.items()}
    return dependence, sizes


def test_estimates_meet_the_closed_form_for_one_shared_draw():
    linear, weight, u_TD = toy()
    z_MD = SIGMA * torch.randn(600, u_TD.shape[1], generator=torch.Generator().manual_seed(1))
    moved = torch.stack([linear.stacked(u_TD * z_D) for z_D in z_MD])
    clean = linear.stacked(u_TD)
    found = projection_statistics(linear, moved, clean)
    dependence, sizes = closed_form(weight, linear.sizes, u_TD)
    for pair, value in dependence.items():
        assert found[f"{pair}/dependence"] == pytest.approx(value, abs=0.05), pair
        assert value > 0.2
    for part, rows in zip("qkv", clean.split(linear.sizes, dim=-1), strict=True):
        expected = sizes[part] / float(rows.double().pow(2).mean().sqrt())
        assert found[f"{part}/relative"] == pytest.approx(expected, rel=0.05)


def test_a_draw_for_each_projection_leaves_them_unrelated():
    linear, _, u_TD = toy()
    generator = torch.Generator().manual_seed(1)
    moved = []
    for _ in range(600):
        outputs = [linear.stacked(u_TD * SIGMA * torch.randn(u_TD.shape[1], generator=generator)) for _ in range(3)]
        moved.append(torch.cat([o.split(linear.sizes, dim=-1)[i] for i, o in enumerate(outputs)], dim=-1))
    found = projection_statistics(linear, torch.stack(moved), linear.stacked(u_TD))
    for pair in ("q_k", "q_v", "k_v"):
        assert abs(found[f"{pair}/dependence"]) < 0.05


def test_proportional_perturbations_have_dependence_one():
    linear, _, u_TD = toy(rows=(3, 3, 3))
    part = torch.randn(4, len(u_TD), 3, generator=torch.Generator().manual_seed(2))
    found = projection_statistics(linear, torch.cat((part, 2 * part, -part), dim=-1), linear.stacked(u_TD))
    assert [found[f"{pair}/dependence"] for pair in ("q_k", "q_v", "k_v")] == pytest.approx([1.0, 1.0, 1.0])


def test_the_squared_norm_is_unbiased_with_two_draws():
    """Over all pairs of equally likely perturbations +-a, the mean of the estimate is |a|^4."""
    a = torch.tensor([1.0, 2.0], dtype=torch.float64)
    total = 0.0
    for first in (a, -a):
        for second in (a, -a):
            draws = torch.stack((first, second))
            products = (draws @ draws.T)[None]
            total += squared_norm(products, products) / 4
    assert total == pytest.approx(25.0)


def noises(model, draws, **settings):
    state = NoiseState(seed=0, rollout=0, stage=1, sigma=SIGMA, sites=("attn_norm", "mlp_norm"), **settings)
    return [
        NoiseState.from_dict({**state.to_dict(), "rollout": rollout}).materialize(model) for rollout in range(draws)
    ]


@pytest.mark.parametrize("scope", ["rollout", "response", "token"])
@torch.no_grad()
def test_in_the_model_shared_draws_tie_projections_and_independent_ones_do_not(model, batch, scope):
    shared = perturbation_metrics(model, batch, noises(model, 48, scope=scope))
    independent = perturbation_metrics(model, batch, noises(model, 48, scope=scope, sharing="independent"))
    pairs = [f"perturbation/{pair}/dependence" for pair in ("q_k", "q_v", "k_v", "gate_up")]
    for pair in pairs:
        assert shared[pair] > 0.3, (pair, shared[pair])
        assert abs(independent[pair]) < 0.15, (pair, independent[pair])
    for part in ("q", "k", "v", "gate", "up"):
        key = f"perturbation/{part}/relative"
        assert independent[key] == pytest.approx(shared[key], rel=0.25)
        assert 0.05 < shared[key] < 0.5
    for key in shared:
        lookup(key)


@torch.no_grad()
def test_a_norm_without_noise_gives_no_metric(model, batch):
    state = NoiseState(seed=0, rollout=0, stage=1, sigma=SIGMA, sites=("mlp_norm",))
    found = perturbation_metrics(model, batch, [state.materialize(model)] * 2)
    assert {key.split("/")[1] for key in found} == {"gate", "up", "gate_up"}

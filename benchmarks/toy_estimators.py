"""Bias and variance of the policy-gradient estimators under noise, exactly, on a policy small enough to enumerate.

    python benchmarks/toy_estimators.py [--json]

The policy writes answers of L tokens out of 3. Its logits are W (u * (w + z)), as behind an RMSNorm with noise: u depends on the
previous token and the position, w = 1, and z, drawn once an answer, takes the 27 values of a three-point Gauss-Hermite rule in 3
channels, so that sums over z and over the 3^L answers are exact. W is trained. Two gradients are exact: that of the noisy objective
E_z E_{o|z}[R], whose policy is the marginal E_z[prod pi(o_t | z)], and that of the clean objective E_{o|z=0}[R], the deployed policy's.
Each estimator is a call of ``qerl.objective``'s own surrogate and importance weights on every (z, o), weighed by its probability.

Printed for each, as root mean squares over random heads: bias, |E[g] - target| / |target|, against both targets; the standard deviation of
one answer's estimate, sqrt(tr Cov) / |target|; and its part between draws of z, which averaging over answers of ONE draw (scope
``rollout``) does not reduce. The last two are against the target that the estimator is meant for.

Legend: Z noise states, O answers, L tokens, V = 3 words, D = 3 channels, P = 9 parameters.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import Tensor

from qerl.kernels import philox
from qerl.objective.importance import WeightRule, importance_weights
from qerl.objective.loss import FORMS, SurrogateSettings, surrogate

V, D = 3, 3
SETTINGS = SurrogateSettings(form=FORMS["dapo"], clip_low=0.2, clip_high=0.28)


@dataclass(frozen=True, slots=True, kw_only=True)
class Toy:
    """The policy at its sampling parameters, enumerated; float64."""

    length: int
    head_VD: Tensor
    noise_ZD: Tensor
    """sigma times the nodes of the rule."""
    weight_Z: Tensor
    """Probability of each noise state; sums to 1."""
    answers_OL: Tensor
    reward_O: Tensor
    """1 where the sum of the tokens is a multiple of 3, else 0: no single token decides it."""


def make_toy(sigma: float, length: int, seed: int = 0) -> Toy:
    """A toy with a keyed random head."""
    nodes = torch.tensor([0.0, 3**0.5, -(3**0.5)], dtype=torch.float64)
    weights = torch.tensor([2 / 3, 1 / 6, 1 / 6], dtype=torch.float64)
    states = torch.tensor(list(itertools.product(range(3), repeat=D)))
    answers = torch.tensor(list(itertools.product(range(V), repeat=length)))
    return Toy(
        length=length,
        head_VD=philox.normal(seed, "toy_head", V * D, device=torch.device("cpu")).double().view(V, D),
        noise_ZD=sigma * nodes[states],
        weight_Z=weights[states].prod(-1),
        answers_OL=answers,
        reward_O=(answers.sum(-1) % 3 == 0).double(),
    )


def token_logprobs(toy: Toy, head_VD: Tensor, noise_ZD: Tensor) -> Tensor:
    """log pi(o_t | o_<t, z) of every answer under every noise state, [Z, O, L]."""
    place = philox.normal(1, "toy_hidden", (V + 1 + toy.length) * D, device=torch.device("cpu")).double().view(-1, D)
    previous_OL = torch.cat([torch.full_like(toy.answers_OL[:, :1], V), toy.answers_OL[:, :-1]], -1)
    x_OLD = place[previous_OL] + place[V + 1 :]
    u_OLD = x_OLD * x_OLD.square().mean(-1, keepdim=True).rsqrt()
    h_ZOLD = u_OLD * (1.0 + noise_ZD[:, None, None])
    logp_ZOLV = (h_ZOLD @ head_VD.T).log_softmax(-1)
    return logp_ZOLV.gather(-1, toy.answers_OL[None, ..., None].expand(len(noise_ZD), -1, -1, 1))[..., 0]


def exact_gradient(toy: Toy, noise_ZD: Tensor, weight_Z: Tensor) -> Tensor:
    """Gradient [P] of sum_o (sum_z p(z) prod_t pi(o_t | z)) R(o) by the head."""
    head_VD = toy.head_VD.clone().requires_grad_()
    marginal_O = (weight_Z[:, None] * token_logprobs(toy, head_VD, noise_ZD).sum(-1).exp()).sum(0)
    return torch.autograd.grad((marginal_O * toy.reward_O).sum(), head_VD)[0].flatten()


def score_function(toy: Toy, noise_ZD: Tensor) -> Tensor:
    """d log pi(o_t | o_<t, z) / d head, [Z, O, L, P]."""
    return torch.func.jacfwd(lambda head_VD: token_logprobs(toy, head_VD, noise_ZD))(toy.head_VD).flatten(-2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """One way to learn from noisy answers."""

    name: str
    settings: str
    target: str
    """``noisy`` or ``clean``: what it is meant to estimate."""
    denominator: str = "recomputed"
    rule: WeightRule | None = None


def _rule(level: str, cap: float | None, mode: str = "truncate") -> WeightRule:
    return WeightRule(level=level, cap=cap, floor=None, mode=mode)  # type: ignore[arg-type]


ESTIMATORS = (
    Estimator(name="replayed", settings="noise=replayed", target="noisy"),
    Estimator(name="absent, no weight", settings="noise=absent is_cap=off", target="clean"),
    Estimator(name="absent, token weight, cap 2", settings="noise=absent", target="clean", rule=_rule("token", 2.0)),
    Estimator(name="absent, token weight, cap 1", settings="noise=absent is_cap=1", target="clean", rule=_rule("token", 1.0)),
    Estimator(name="absent, token weight, no bound", settings="noise=absent is_cap=unbounded", target="clean", rule=_rule("token", None)),
    Estimator(name="absent, sequence weight, cap 2", settings="noise=absent is_level=sequence", target="clean", rule=_rule("sequence", 2.0)),
    Estimator(name="absent, sequence weight, above 2 masked", settings="noise=absent is_level=sequence is_mode=mask", target="clean", rule=_rule("sequence", 2.0, "mask")),
    Estimator(name="absent, sequence weight, no bound", settings="noise=absent is_level=sequence is_cap=unbounded", target="clean", rule=_rule("sequence", None)),
    Estimator(name="absent over behavior", settings="noise=absent denominator=behavior", target="clean", denominator="behavior"),
)  # fmt: skip


def estimate(toy: Toy, estimator: Estimator) -> Tensor:
    """The gradient estimate [Z, O, P] that one answer gives, before any update, from the package's own surrogate."""
    noisy_ZOL = token_logprobs(toy, toy.head_VD, toy.noise_ZD)
    clean_ZOL = token_logprobs(toy, toy.head_VD, torch.zeros(1, D).double()).expand_as(noisy_ZOL)
    trained_ZOL = noisy_ZOL if estimator.target == "noisy" else clean_ZOL
    denominator_ZOL = noisy_ZOL if estimator.denominator == "behavior" else trained_ZOL
    probability_ZO = toy.weight_Z[:, None] * noisy_ZOL.sum(-1).exp()
    advantage_O = toy.reward_O - (probability_ZO * toy.reward_O).sum()
    sequences = noisy_ZOL.shape[0] * noisy_ZOL.shape[1]
    lengths_S = torch.full((sequences,), toy.length)
    sequence_N = torch.arange(sequences).repeat_interleave(toy.length)
    importance_N = None
    if estimator.rule is not None:
        importance_N = importance_weights(
            clean_ZOL.flatten(), noisy_ZOL.flatten(), sequence_N, lengths_S, estimator.rule
        ).weight_N
    leaf_N = trained_ZOL.flatten().clone().requires_grad_()
    result = surrogate(
        leaf_N,
        denominator_ZOL.flatten(),
        advantage_O.repeat(len(toy.noise_ZD))[sequence_N],
        torch.ones(sequences * toy.length).double(),
        SETTINGS,
        sequence_N=sequence_N,
        lengths_S=lengths_S,
        importance_N=importance_N,
    )
    slope_ZOL = -torch.autograd.grad(result.loss, leaf_N)[0].view_as(noisy_ZOL)
    noise_ZD = toy.noise_ZD if estimator.target == "noisy" else torch.zeros_like(toy.noise_ZD)
    return (slope_ZOL[..., None] * score_function(toy, noise_ZD)).sum(2)


def measure(toy: Toy, estimator: Estimator) -> dict[str, float]:
    """Squares: of the bias against either target, of the spread of one answer's estimate, of its part between noise
    states, and of the targets."""
    targets = targets_of(toy)
    given_ZO = token_logprobs(toy, toy.head_VD, toy.noise_ZD).sum(-1).exp()
    found_ZOP = estimate(toy, estimator)
    mean_ZP = (given_ZO[..., None] * found_ZOP).sum(1)
    mean_P = (toy.weight_Z[:, None] * mean_ZP).sum(0)
    total = (toy.weight_Z[:, None] * given_ZO * found_ZOP.square().sum(-1)).sum() - mean_P.square().sum()
    between = (toy.weight_Z * (mean_ZP - mean_P).square().sum(-1)).sum()
    return {
        **{f"bias_{name}": float((mean_P - target).square().sum()) for name, target in targets.items()},
        **{f"target_{name}": float(target.square().sum()) for name, target in targets.items()},
        "spread": float(total),
        "between": float(between),
    }


def relative(cells: Sequence[dict[str, float]], estimator: Estimator) -> dict[str, float]:
    """Root mean squares over several toys, over that of the target: of its own target for a bias, of the estimator's for a spread."""
    mean = {key: sum(cell[key] for cell in cells) / len(cells) for key in cells[0]}
    own = mean[f"target_{estimator.target}"]
    return {
        "bias_noisy": (mean["bias_noisy"] / mean["target_noisy"]) ** 0.5,
        "bias_clean": (mean["bias_clean"] / mean["target_clean"]) ** 0.5,
        "spread": (mean["spread"] / own) ** 0.5,
        "between": (mean["between"] / own) ** 0.5,
    }


def targets_of(toy: Toy) -> dict[str, Tensor]:
    """The exact gradients."""
    return {
        "noisy": exact_gradient(toy, toy.noise_ZD, toy.weight_Z),
        "clean": exact_gradient(toy, torch.zeros(1, D).double(), torch.ones(1).double()),
    }


def weight_figures(toy: Toy) -> dict[str, float]:
    """Sequence weights pi_clean(o) / pi(o | z): mean (1 exactly), mean |log w|, and effective share of the answers."""
    noisy_ZO = token_logprobs(toy, toy.head_VD, toy.noise_ZD).sum(-1)
    clean_O = token_logprobs(toy, toy.head_VD, torch.zeros(1, D).double())[0].sum(-1)
    probability_ZO, log_ZO = toy.weight_Z[:, None] * noisy_ZO.exp(), clean_O - noisy_ZO
    return {
        "mean": float((probability_ZO * log_ZO.exp()).sum()),
        "mean_abs_log": float((probability_ZO * log_ZO.abs()).sum()),
        "effective": float(1.0 / (probability_ZO * (2 * log_ZO).exp()).sum()),
    }


def study(sigma: float, length: int, toys: int) -> dict[str, Any]:
    """One table: every estimator on ``toys`` random heads."""
    made = [make_toy(sigma, length, seed) for seed in range(toys)]
    figures = [weight_figures(toy) for toy in made]
    return {
        "sigma": sigma,
        "length": length,
        "toys": toys,
        "weights": {key: sum(figure[key] for figure in figures) / toys for key in figures[0]},
        "estimators": {
            estimator.name: relative([measure(toy, estimator) for toy in made], estimator) for estimator in ESTIMATORS
        },
    }


def table(row: dict[str, Any]) -> str:
    """A study as Markdown."""
    figures = row["weights"]
    lines = [
        (
            f"sigma {row['sigma']}, {row['length']} tokens, {row['toys']} heads: mean |log w| {figures['mean_abs_log']:.3f}, "
            f"effective share {figures['effective']:.3f}, mean weight {figures['mean']:.6f}"
        ),
        "",
        "| estimator | bias to noisy | bias to clean | spread of one answer | of it between draws |",
        "|---|---|---|---|---|",
    ]
    for name, cell in row["estimators"].items():
        values = " | ".join(f"{cell[key]:.3f}" for key in ("bias_noisy", "bias_clean", "spread", "between"))
        lines.append(f"| {name} | {values} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the tables, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--toys", type=int, default=16, help="random heads to average over")
    arguments = parser.parse_args()
    rows = [
        study(sigma, length, arguments.toys) for sigma, length in ((0.05, 4), (0.2, 4), (0.5, 4), (0.2, 2), (0.2, 6))
    ]
    print(json.dumps(rows, indent=1) if arguments.json else "\n".join(map(table, rows)))


if __name__ == "__main__":
    main()

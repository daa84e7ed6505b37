"""Whether a step learned from its own policy's answers, decided by identity.

A ratio near 1 is no evidence: it is 1 by construction with the recomputed denominator, and near 1 whenever two
policies happen to agree on the sampled tokens. Answers are on-policy when the policy that sampled them and the policy
whose gradient is taken agree in adapter version, clean norms, base weights, noise key, sampler transform, kernels, and
in what the KV cache was computed under.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from qerl.config.schema import Config
from qerl.model.aqn import NoiseState
from qerl.records import Rollout, SamplingSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFacts:
    """What makes two policies the same one. Field names are the reasons that a report shows."""

    adapter_version: str
    """Completed updates, and the hash of the adapter before the first update of the step."""
    norm_hash: str
    base_weights: str
    noise_key: NoiseState | None
    """None without noise, and with noise of size 0."""
    sampler_transform: str
    """What is done to the logits before they are probabilities."""
    kernels: Mapping[str, str]
    cache_state: str
    """``empty``: every key and value was computed by this very policy."""


def sampling_facts(rollout: Rollout) -> PolicyFacts:
    """The policy that sampled, from its record."""
    policy = rollout.policy
    return PolicyFacts(
        adapter_version=f"{policy.policy_version} ({policy.adapter_hash})",
        norm_hash=policy.norm_hash,
        base_weights=f"{policy.base_format} {policy.base_hash}",
        noise_key=_audible(policy.noise),
        sampler_transform=_transform(rollout.sampling),
        kernels=rollout.kernels,
        cache_state=rollout.cache_state,
    )


def training_facts(config: Config, rollout: Rollout, *, norm_hash: str, kernels: Mapping[str, str]) -> PolicyFacts:
    """The policy that the first update on a rollout differentiates.

    Args:
        config: says whether the noise is replayed, and at which temperature log-probs are taken.
        rollout: its answers are trained on. No update has been made since it was sampled, so adapter and base are its own.
        norm_hash: of the norm scales as the trainer has them now.
        kernels: operation -> implementation in the trainer's passes.
    """
    replayed = config.objective.noise == "replayed"
    return replace(
        sampling_facts(rollout),
        norm_hash=norm_hash,
        noise_key=_audible(rollout.policy.noise) if replayed else None,
        sampler_transform=_transform(SamplingSpec(temperature=config.rollout.temperature)),
        kernels=kernels,
        cache_state="empty",
    )


def differences(sampled: PolicyFacts, trained: PolicyFacts, *, updates: int = 1) -> dict[str, str]:
    """What keeps the answers from being on-policy: reason -> detail; empty when they are.

    Args:
        sampled: the policy that sampled.
        trained: the policy of the first update.
        updates: optimizer updates made on the answers; from the second on, the parameters are newer.
    """
    found = {}
    for name in PolicyFacts.__slots__:
        before, after = getattr(sampled, name), getattr(trained, name)
        if before != after:
            found[name] = f"sampled with {_shown(before)}, trained with {_shown(after)}"
    if updates > 1:
        found.setdefault("adapter_version", f"updates 2 to {updates} on a rollout are made at newer parameters")
    return found


def count_step(off_policy: dict[str, Any], found: Mapping[str, str], step: int) -> None:
    """Add a step's reasons to the run's: reason -> steps, first step, and its detail."""
    for name, detail in found.items():
        entry = off_policy.setdefault(name, {"steps": 0, "first_step": step, "detail": detail})
        entry["steps"] += 1


def verdict(off_policy: Mapping[str, Any], on_policy_steps: int, steps: int) -> dict[str, Any]:
    """The summary's ``on_policy``: said of a run only when it holds for every step."""
    return {
        "on_policy": steps > 0 and on_policy_steps == steps,
        "on_policy_steps": on_policy_steps,
        "steps": steps,
        "reasons": dict(off_policy),
    }


def _audible(noise: NoiseState | None) -> NoiseState | None:
    return None if noise is None or noise.silent else noise


def _transform(sampling: SamplingSpec) -> str:
    cut = [
        f"{name}={value:g}"
        for name, value, off in (
            ("top_p", sampling.top_p, 1.0),
            ("top_k", sampling.top_k, 0),
            ("min_p", sampling.min_p, 0.0),
        )
        if value != off
    ]
    return f"softmax(logits / {sampling.temperature:g}), {' '.join(cut) or 'full support'}"


def _shown(value: Any) -> str:
    if value is None:
        return "no noise"
    if isinstance(value, NoiseState):
        return f"noise of rollout {value.rollout}, level {value.displacement:g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {kernel}" for name, kernel in sorted(value.items()))
    return str(value)

"""Which policy is sampling now: adapter version, hashes and noise.

Trainer and engine share tensors, so after an update there is nothing to copy; what changes is the version (completed
updates) and, at the next rollout, the noise. The clean norm scales are hashed before and after every rollout: noise is
an argument of the forward pass and never touches them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from qerl.config.schema import Config
from qerl.model.aqn import Noise, NoiseState, noise_state
from qerl.model.checkpoint import adapter_hash, norm_hash
from qerl.model.decoder import Decoder
from qerl.records import PolicyState


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivePolicy:
    """The policy of one rollout: its identity and its materialized noise (None when sigma is 0 or noise is off)."""

    state: PolicyState
    noise: Noise | None


def activate_policy(config: Config, model: Decoder, *, base_hash: str, rollout: int, completed: int) -> ActivePolicy:
    """Identity and noise of the next rollout.

    Args:
        config: ``aqn`` and ``train.seed`` decide the noise.
        model: the shared decoder.
        base_hash: hash of the stored base weights, computed once a run.
        rollout: rollout index, part of every noise key.
        completed: optimizer updates made so far; decides the stage.
    """
    state = noise_state(
        config.aqn, seed=config.train.seed, rollout=rollout, completed=completed, planned=config.planned_updates
    )
    return ActivePolicy(
        state=PolicyState(
            policy_version=completed,
            adapter_hash=adapter_hash(model),
            norm_hash=norm_hash(model),
            base_format=config.quant.format,
            base_hash=base_hash,
            noise=state,
        ),
        noise=materialize(state, model),
    )


def evaluation_noise(config: Config, model: Decoder, *, step: int, completed: int) -> Noise | None:
    """Noise of an evaluation after ``step``: the current stage's sigma under a stream of its own; None unless
    ``eval.noise`` is set."""
    if not config.eval.noise:
        return None
    state = noise_state(
        config.aqn, seed=config.train.seed, rollout=step, completed=completed, planned=config.planned_updates
    )
    return None if state is None else materialize(replace(state, stream="eval_noise"), model)


def materialize(state: NoiseState | None, model: Decoder) -> Noise | None:
    """The draws of a noise state; None when there is nothing to add, so that sigma 0 runs the noise-free code."""
    if state is None or state.sigma == 0.0:
        return None
    return state.materialize(model)


def assert_clean_scales(model: Decoder, policy: ActivePolicy) -> None:
    """The clean scales after a rollout are what they were before it."""
    after = norm_hash(model)
    assert after == policy.state.norm_hash, f"norm scales changed during a rollout: {policy.state.norm_hash} -> {after}"

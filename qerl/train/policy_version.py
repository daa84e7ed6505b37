"""Which policy is sampling now: adapter version, hashes and noise.

Trainer and engine share tensors, so after an update there is nothing to copy; what changes is the version (completed
updates) and, at the next rollout, the noise. The clean norm scales are hashed before and after every rollout: noise is
an argument of the forward pass and never touches them.
"""

from __future__ import annotations

from dataclasses import dataclass

from qerl.config.schema import Config
from qerl.model.aqn import Noise
from qerl.model.checkpoint import adapter_hash, norm_hash
from qerl.model.decoder import Decoder
from qerl.records import PolicyState
from qerl.train.noise.director import NoiseDirector


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivePolicy:
    """The policy of one rollout: its identity and its materialized noise (None when sigma is 0 or noise is off)."""

    state: PolicyState
    noise: Noise | None


def activate_policy(
    config: Config, model: Decoder, noise: NoiseDirector, *, base_hash: str, rollout: int, completed: int
) -> ActivePolicy:
    """Identity and noise of the next rollout.

    Args:
        config: names the base format.
        model: the shared decoder.
        noise: decides the rollout's noise.
        base_hash: hash of the stored base weights, computed once a run.
        rollout: rollout index, part of every noise key.
        completed: optimizer updates made so far; decides the stage.
    """
    state, drawn = noise.begin(rollout=rollout, completed=completed)
    return ActivePolicy(
        state=PolicyState(
            policy_version=completed,
            adapter_hash=adapter_hash(model),
            norm_hash=norm_hash(model),
            base_format=config.quant.storage(config.quant.format),
            base_hash=base_hash,
            noise=state,
        ),
        noise=drawn,
    )


def assert_clean_scales(model: Decoder, policy: ActivePolicy) -> None:
    """The clean scales after a rollout are what they were before it."""
    after = norm_hash(model)
    assert after == policy.state.norm_hash, f"norm scales changed during a rollout: {policy.state.norm_hash} -> {after}"

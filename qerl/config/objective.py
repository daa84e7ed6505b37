"""The ``objective`` section: which surrogate, divided by what, and what its settings rule out."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from qerl.config.section import Section

CLIP_DEFAULTS: dict[str, tuple[float | Literal["off"], float]] = {
    "dapo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
    "cispo": ("off", 5.0),
}
"""Objective -> what clip_low and clip_high are when they are `auto`; types without an entry take DAPO's."""
WEIGHT_DEFAULTS = {"is_floor": "off", "is_level": "token", "is_mode": "truncate"}
"""Settings of the importance weight that say nothing without one."""
DEFAULT_ROUNDS = 10
"""As verl's recipes have it."""


class ObjectiveConfig(Section):
    """The clipped surrogate and its denominator."""

    type: Literal["grpo", "dapo", "dr_grpo", "bnpo", "gspo", "cispo"] = "dapo"
    """grpo: mean over sequences of token means. dapo: token mean over the whole batch. dr_grpo: token sum over B * max_new_tokens. bnpo: token mean over the mini-batch. gspo: grpo with the mean ratio of the sequence. cispo: dapo's mean of log-probs under a capped stop-gradient ratio."""
    clip_low: Annotated[float, Field(ge=0, lt=1)] | Literal["auto", "off"] = "auto"
    """Lower clip: ratio >= 1 - clip_low (TRL `epsilon`); `off` has none. `auto`: 0.2; gspo 3e-4; cispo off, the only value it takes."""
    clip_high: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    """Upper clip: ratio <= 1 + clip_high (TRL `epsilon_high`); with cispo the bound of the ratio itself, at least 1. `auto`: 0.28; gspo 4e-4; cispo 5."""
    dual_clip: Annotated[float, Field(gt=1)] | Literal["off"] = "off"
    """Also bound the ratio by this where the advantage is negative, so that one token cannot dominate (TRL `delta`); larger than 1 + clip_high, and not with cispo."""
    denominator: Literal["auto", "behavior", "recomputed"] = "auto"
    """`behavior`: log-probs recorded by the engine. `recomputed`: the trainer's own pass at the old parameters. `auto`: behavior with noise replayed, recomputed with noise absent."""
    noise: Literal["replayed", "absent"] = "replayed"
    """`replayed`: train the policy given its noise. `absent`: train the clean policy from noisy behavior."""
    is_cap: Annotated[float, Field(gt=0)] | Literal["auto", "off", "unbounded"] = "auto"
    """Upper bound c of the importance weight pi_old / pi_behavior, which exists only with denominator=recomputed. `off`: no weight. `unbounded`: no upper bound. `auto`: 2.0 with recomputed, off with behavior."""
    is_floor: Annotated[float, Field(ge=0)] | Literal["off"] = "off"
    """Lower bound of that weight, below is_cap."""
    is_level: Literal["token", "sequence"] = "token"
    """`token`: one weight a token. `sequence`: their product over the answer, the same for all of its tokens."""
    is_mode: Literal["truncate", "mask"] = "truncate"
    """What becomes of a weight outside its bounds: set to the bound, or to 0 (the token or answer leaves the gradient and stays in the divisor)."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL estimate to the reference: same model, adapters and noise off, initial norms (TRL `beta`)."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL. k3 is what TRL uses. k1 has zero mean gradient in the loss and is warned of."""
    advantage: Literal["group", "none", "batch", "leave_one_out"] = "group"
    """`group`: (R - mean) / (std + eps), population std. `none`: R - mean (Dr. GRPO). `batch`: R - group mean over the batch's std. `leave_one_out`: R - mean of the others."""
    mask_truncated: bool = False
    """Truncated answers stay in the group statistics but leave the loss."""
    dynamic_sampling: bool = False
    """Keep drawing prompts until rollout.prompts_per_step groups have both correct and incorrect answers, and train on those alone (DAPO)."""
    dynamic_sampling_max_rounds: Annotated[int, Field(ge=2)] = DEFAULT_ROUNDS
    """Most rounds of sampling a step, the first included; then the step goes on with a smaller batch and a warning."""

    @model_validator(mode="after")
    def _check(self) -> ObjectiveConfig:
        self._resolve_clip()
        self._resolve_weight()
        if self.kl_coef == 0 and self.kl_estimator != "k3":
            raise ValueError(
                f"objective.kl_estimator={self.kl_estimator} has no meaning with objective.kl_coef=0: set a kl_coef above 0 "
                "or leave kl_estimator out"
            )
        if not self.dynamic_sampling and self.dynamic_sampling_max_rounds != DEFAULT_ROUNDS:
            raise ValueError(
                "objective.dynamic_sampling_max_rounds has no meaning with objective.dynamic_sampling=false: set it to true"
            )
        return self

    def _resolve_clip(self) -> None:
        low, high = CLIP_DEFAULTS.get(self.type, CLIP_DEFAULTS["dapo"])
        if self.clip_low == "auto":
            object.__setattr__(self, "clip_low", low)
        if self.clip_high == "auto":
            object.__setattr__(self, "clip_high", high)
        assert isinstance(self.clip_high, float)
        if self.type != "cispo":
            if self.dual_clip != "off" and self.dual_clip <= 1 + self.clip_high:
                raise ValueError(
                    f"objective.dual_clip={self.dual_clip} must be larger than 1 + objective.clip_high = {1 + self.clip_high:g}"
                )
            return
        if self.clip_low != "off" or self.dual_clip != "off":
            raise ValueError(
                "objective.type=cispo bounds its weight from above alone, by clip_high: "
                "leave objective.clip_low and objective.dual_clip out, or use another type"
            )
        if self.clip_high < 1:
            raise ValueError(
                f"objective.clip_high={self.clip_high} with type=cispo is the bound of the ratio itself (not 1 + clip_high) and would "
                "shrink every token: use a number of at least 1, such as 5"
            )

    def _resolve_weight(self) -> None:
        if self.denominator == "auto":
            object.__setattr__(self, "denominator", "behavior" if self.noise == "replayed" else "recomputed")
        if self.denominator == "behavior" and self.is_cap not in ("auto", "off"):
            raise ValueError(
                "objective.is_cap has no meaning with objective.denominator=behavior: the ratio is already taken to the behavior "
                "policy and a second weight would count it twice; use denominator=recomputed or is_cap=off"
            )
        if self.is_cap == "auto":
            object.__setattr__(self, "is_cap", 2.0 if self.denominator == "recomputed" else "off")
        if self.is_cap == "off":
            unused = [name for name, value in WEIGHT_DEFAULTS.items() if getattr(self, name) != value]
            if unused:
                raise ValueError(
                    f"objective.{unused[0]} has no meaning without importance weights (objective.is_cap=off, and always with "
                    "denominator=behavior): use denominator=recomputed with an is_cap, or leave it out"
                )
        elif isinstance(self.is_floor, float) and isinstance(self.is_cap, float) and self.is_floor >= self.is_cap:
            raise ValueError(f"objective.is_floor={self.is_floor} must be smaller than objective.is_cap={self.is_cap}")
        elif self.is_mode == "mask" and self.is_cap == "unbounded" and self.is_floor == "off":
            raise ValueError(
                "objective.is_mode=mask needs a bound to go by: give objective.is_cap or objective.is_floor"
            )

"""The ``aqn`` section: adaptive quantization noise, its calibration and its controller, and what they rule out."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from qerl.config.section import Fraction, Positive, Section

Site = Literal["attn_norm", "mlp_norm", "final_norm", "qk_norm"]
SENSITIVITY_CAP = 4.0


class AqnCalibrationConfig(Section):
    """The calibration batch: the first training prompts with answers that the model sampled itself at the start."""

    prompts: Positive = 32
    """Prompts, and so answers and noise draws, of the batch. KL and entropy change are measured on it at every new stage."""
    max_new_tokens: Positive = 64
    """Longest answer of the batch (rollout.max_new_tokens if that is shorter)."""
    tolerance: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """Relative error of the KL at which a bisection (magnitude=kl, match_budget) ends."""


class AqnControllerConfig(Section):
    """Sigma follows what the rollouts show, instead of the schedule: a PI controller on log sigma."""

    enabled: bool = False
    """Off: sigma is the schedule's. On: it starts there in stage 1 and then follows the signals; the schedule's sigma is logged beside it."""
    target_informative: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Wanted share of groups with both correct and incorrect answers. Fewer raise sigma, more lower it."""
    informative_band: Annotated[float, Field(ge=0, lt=0.5)] = 0.1
    """Half width of the band around that target within which sigma rests."""
    gain_proportional: Annotated[float, Field(ge=0)] = 0.5
    """Change of log sigma per change of the error."""
    gain_integral: Annotated[float, Field(ge=0)] = 0.3
    """Change of log sigma per rollout and unit of error."""
    smoothing: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Weight of the newest rollout in the running means of the signals; 1 is no smoothing."""
    entropy_band: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = (0.5, 2.0)
    """Entropy must stay between these multiples of its mean over the noise-free stage 0; outside, sigma is driven back whatever the groups say."""
    invalid_max: Fraction = 0.25
    """Largest share of unparsable and truncated answers; above it sigma is driven down whatever the groups say."""
    sigma_min: Annotated[float, Field(gt=0)] = 1.0e-4
    """Lowest sigma."""
    sigma_max: Annotated[float, Field(gt=0)] = 1.0e-1
    """Highest sigma."""
    max_change: Annotated[float, Field(gt=1)] = 1.5
    """Largest factor by which sigma changes from one rollout to the next."""

    @model_validator(mode="after")
    def _check(self) -> AqnControllerConfig:
        for name, low, high in (
            ("sigma_min and sigma_max", self.sigma_min, self.sigma_max),
            ("entropy_band", *self.entropy_band),
        ):
            if low >= high:
                raise ValueError(f"aqn.controller: {name} must rise, got {low} and {high}")
        if self.enabled and self.gain_proportional == self.gain_integral == 0:
            raise ValueError("aqn.controller: with both gains 0 sigma never changes; use aqn.schedule=constant")
        return self


class AqnConfig(Section):
    """Adaptive quantization noise: h = u * (w + z), z ~ N(0, sigma^2), keyed and replayable."""

    enabled: bool = True
    """Switch of its own; never inferred from the format or a name."""
    schedule: Literal["exponential", "linear", "cosine", "logarithmic", "constant"] = "exponential"
    """How sigma goes from sigma_start to sigma_end over stages 1..num_stages-1; stage 0 is noise-free."""
    sigma_start: Annotated[float, Field(ge=0)] = 5.0e-2
    """Sigma of stage 1; with magnitude=kl its KL target, in nats a token (such as 0.02)."""
    sigma_end: Annotated[float, Field(ge=0)] = 5.0e-4
    """Sigma of the last stage; with magnitude=kl its KL target (such as 1e-4)."""
    num_stages: Annotated[int, Field(ge=2, le=10_000)] = 10
    """Number of stages K over the planned optimizer updates; stage = floor(K * completed / planned)."""
    scope: Literal["rollout", "group", "response", "token"] = "rollout"
    """How long one draw lasts. `rollout`: a whole rollout phase. `group`: the answers to one prompt occurrence. `response`: one answer. `token`: one position of one answer."""
    mode: Literal["replace", "accumulate"] = "replace"
    """`replace`: every draw starts from the clean scale. `accumulate`: draws of all rollouts add up (a random walk; its variance is the sum of sigma^2); for experiments, with scope=rollout and magnitude=absolute."""
    sharing: Literal["shared", "independent"] = "shared"
    """`shared`: the projections that read a norm see one draw. `independent`: q, k, v, gate and up have a draw each, which breaks their fused products: an ablation, slower."""
    match_budget: bool = False
    """With sharing=independent: scale the draws so that KL(clean, noisy) on the calibration batch equals that of shared noise of the same sigma."""
    magnitude: Literal["absolute", "relative", "sensitivity", "kl"] = "absolute"
    """`absolute`: z has standard deviation sigma. `relative`: sigma * |w|, w the clean scale when the rollout began. `sensitivity`: sigma * s * |w|, s falling with the logit change that noise at that norm causes. `kl`: relative, with sigma bisected so that KL(clean, noisy) on the calibration batch is the schedule's value."""
    sensitivity_cap: Annotated[float, Field(ge=1)] = SENSITIVITY_CAP
    """Largest factor s of magnitude=sensitivity (their mean before the cap is 1)."""
    prompt: Literal["noisy", "clean"] = "noisy"
    """`noisy`: prompt positions see the same noise as the answer. `clean`: they see none, so that all answers to a prompt share its keys and values under every scope."""
    sites: tuple[Site, ...] = ("attn_norm", "mlp_norm")
    """Norms that receive noise. The attention norm is read by q, k, v; the MLP norm by gate, up; `qk_norm` is the norm over each head of q and of k, which only some models have (qwen3)."""
    calibration: AqnCalibrationConfig = AqnCalibrationConfig()
    """What KL, entropy change and sensitivity are measured on."""
    controller: AqnControllerConfig = AqnControllerConfig()
    """Adaptive sigma."""

    @model_validator(mode="after")
    def _check(self) -> AqnConfig:
        if self.enabled:
            for problem in (_schedule_problem(self), _combination_problem(self), _controller_problem(self)):
                if problem is not None:
                    raise ValueError(problem)
        return self


def _schedule_problem(aqn: AqnConfig) -> str | None:
    one_end_is_zero = (aqn.sigma_start == 0) != (aqn.sigma_end == 0)
    if aqn.schedule == "exponential" and aqn.num_stages > 2 and one_end_is_zero:
        return (
            f"an exponential schedule cannot reach 0: sigma_start={aqn.sigma_start}, sigma_end={aqn.sigma_end}; "
            "use schedule=linear, or a small positive end"
        )
    if not aqn.sites:
        return "aqn.sites is empty while aqn.enabled is true: name a site or set aqn.enabled=false"
    if len(set(aqn.sites)) < len(aqn.sites):
        return f"aqn.sites names a site twice: {', '.join(aqn.sites)}"
    return None


def _combination_problem(aqn: AqnConfig) -> str | None:
    """Settings that contradict one another, or of which one would have no effect."""
    if aqn.mode == "accumulate" and aqn.scope != "rollout":
        return f"aqn.mode=accumulate needs aqn.scope=rollout: with scope={aqn.scope} no draw outlives its rollout"
    if aqn.mode == "accumulate" and aqn.magnitude != "absolute":
        return (
            f"aqn.mode=accumulate needs aqn.magnitude=absolute: with {aqn.magnitude} the sum would depend on the scales of every "
            "earlier rollout, and its record could not reproduce it"
        )
    if aqn.match_budget and aqn.sharing == "shared":
        return "aqn.match_budget compares independent with shared draws: it needs aqn.sharing=independent"
    if aqn.match_budget and aqn.magnitude == "kl":
        return "aqn.match_budget has no meaning with aqn.magnitude=kl, which holds every arm to the same KL already"
    if aqn.sharing == "independent" and not {"attn_norm", "mlp_norm"} & set(aqn.sites):
        return "aqn.sharing=independent has no effect: it needs attn_norm or mlp_norm among aqn.sites"
    if aqn.magnitude != "sensitivity" and aqn.sensitivity_cap != SENSITIVITY_CAP:
        return f"aqn.sensitivity_cap={aqn.sensitivity_cap} has no effect with aqn.magnitude={aqn.magnitude}"
    return None


def _controller_problem(aqn: AqnConfig) -> str | None:
    controller = aqn.controller
    if not controller.enabled:
        return None
    if aqn.mode == "accumulate":
        return "aqn.controller cannot lower a sum of draws: it needs aqn.mode=replace"
    if aqn.magnitude == "kl":
        return "aqn.controller sets sigma, and so does aqn.magnitude=kl: use absolute, relative or sensitivity with it"
    if not controller.sigma_min <= aqn.sigma_start <= controller.sigma_max:
        return (
            f"the controller starts at aqn.sigma_start={aqn.sigma_start}, which lies outside aqn.controller.sigma_min="
            f"{controller.sigma_min} to aqn.controller.sigma_max={controller.sigma_max}"
        )
    return None

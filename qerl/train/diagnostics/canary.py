"""The adapter canary: do trainer and engine both use the adapters, and agree?

An engine that ignores the adapter, or reads an old one, samples from the base model while the trainer improves a policy
that nobody plays: rewards stay flat and every loss looks sound. At every update the step's own answers tell: the learning pass scores
them under the policy that the engine says it sampled from, and ``own_answer`` says whether adapters and noise move them. After the first
step, every ``AGAIN_EVERY`` steps and the last, one prompt is answered here, with and without adapters, to the bit: it sees changes that
are smaller than rounding, and the policy that the last update leaves behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from qerl.config.schema import KvFormat
from qerl.errors import TrainingError
from qerl.model.decoder import Decoder
from qerl.records import Completion, Prompt, SamplingSpec
from qerl.rollout.engine import Engine

CANARY_STREAM = "canary"
CANARY_TOKENS = 6
AGAIN_EVERY = 10
"""Steps between canaries, and between answers and scores without adapters."""

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""Compute type -> mean |log-prob of the engine - of the trainer| over the canary's tokens above which they disagree.
Rounding gives about 1e-6 and 1e-2."""

FP8_TOLERANCE = 0.2
"""The same where the engine keeps keys or values in FP8, whose rounding gives up to 0.1 in any compute type."""

MOVES_FROM = {torch.float32: 1e-7, torch.bfloat16: 1e-4}
"""Compute type -> largest |scale * B| from which an adapter must change log-probs; below, rounding may hide it."""

CERTAIN = 1e-4
"""A log-prob closer to 0 says nothing: float32 cannot show small changes of a probability next to 1."""

DOUBT = "Do not trust this run's rewards; please report it with `qerl env`"
GO_ON = "diagnostics.canary=false goes on without the check"

Score = Callable[[Completion, bool], torch.Tensor]
"""(answer, adapters on or off) -> the trainer's log-probs of its tokens, without noise, float32 [N]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """What the canary saw; log-probs in nats."""

    adapter_size: float
    """Largest |scale * B| of all adapters."""
    adapter_effect: float | None
    """Mean |log-prob with - without adapters| in the trainer; None where nothing was scored without them."""
    engine_difference: float
    """Mean |engine - trainer|, adapters on."""
    engine_moved: bool | None
    """Whether the engine's answer or its log-probs change when adapters are switched off; None where they were not."""
    telling: bool
    """Whether a token was uncertain enough for its log-prob to show a change."""

    def metrics(self) -> dict[str, float]:
        found = {"canary/adapter_size": self.adapter_size, "canary/engine_difference": self.engine_difference}
        return found if self.adapter_effect is None else found | {"canary/adapter_effect": self.adapter_effect}


def read_canary(
    model: Decoder,
    engine: Engine,
    score: Score,
    prompt: Prompt,
    *,
    temperature: float,
    seed: int,
    step: int,
    without: bool = True,
) -> Readings:
    """Answer ``prompt`` with the engine and score the answer with the trainer, with and without adapters.

    Args:
        model: the shared decoder.
        engine: answers without noise.
        score: the trainer's log-probs at ``temperature``.
        prompt: the canary.
        temperature: of the sampler.
        seed: root seed; the answer is keyed by (seed, step).
        step: completed steps.
        without: do it without adapters, too.
    """
    sampling = SamplingSpec(
        temperature=temperature, max_new_tokens=CANARY_TOKENS, seed=seed, stream=CANARY_STREAM, rollout=step
    )
    (on,), _ = engine.generate([prompt], sampling, adapters=True)
    with_N = score(on, True).double()
    effect = moved = None
    if without:
        (off,), _ = engine.generate([prompt], sampling, adapters=False)
        effect = float((with_N - score(on, False).double()).abs().mean())
        moved = (on.token_ids, on.behavior_logprobs) != (off.token_ids, off.behavior_logprobs)
    engine_N = torch.tensor(on.behavior_logprobs, dtype=torch.float64, device=with_N.device)
    return Readings(
        adapter_size=adapter_size(model),
        adapter_effect=effect,
        engine_difference=float((engine_N - with_N).abs().mean()),
        engine_moved=moved,
        telling=float(with_N.min()) < -CERTAIN,
    )


def check_canary(readings: Readings, dtype: torch.dtype, kv_format: KvFormat = "compute") -> None:
    """Stop a run whose canary is dead; ``kv_format`` is how the engine keeps keys and values.

    Raises:
        TrainingError: the adapters change nothing in the trainer or in the engine though they are not zero, or the two
            disagree.
    """
    remedy = f"{DOUBT}. {GO_ON}"
    size = f"largest adapter entry {readings.adapter_size:.3g}"
    if readings.engine_moved is not None and readings.telling and readings.adapter_size >= MOVES_FROM[dtype]:
        if readings.adapter_effect == 0.0:
            raise TrainingError(
                "canary: the trainer's log-probs do not change with the adapters",
                got=f"{size}, log-probs equal to those of the base",
                expected="log-probs that move",
                remedy=remedy,
            )
        if not readings.engine_moved:
            raise TrainingError(
                "canary: the engine ignores the adapters",
                got=f"{size}, and the engine answers as the base model does, to the bit",
                expected=f"log-probs that move, as the trainer's do (by {readings.adapter_effect:.3g} nats a token)",
                remedy=remedy,
            )
    check_agreement(readings.engine_difference, dtype, kv_format)


def check_agreement(difference: float, dtype: torch.dtype, kv_format: KvFormat = "compute") -> None:
    """Stop a run whose engine and trainer disagree by ``difference``, a mean over tokens that both scored under one policy.

    Raises:
        TrainingError: they do.
    """
    tolerance, arithmetic, remedy = TOLERANCE[dtype], str(dtype).removeprefix("torch."), f"{DOUBT}. {GO_ON}"
    if kv_format != "compute":
        tolerance, arithmetic = FP8_TOLERANCE, f"{arithmetic} with rollout.kv_format={kv_format}"
        remedy = f"Try rollout.kv_format=compute: if this goes, the rounding is too coarse for the model. If it stays: {DOUBT[0].lower()}{DOUBT[1:]}. {GO_ON}"
    if not difference <= tolerance:
        raise TrainingError(
            "canary: engine and trainer disagree on the current policy",
            got=f"mean difference of log-probs {difference:.3g}",
            expected=f"at most {tolerance:g} in {arithmetic}",
            remedy=remedy,
        )


def adapter_size(model: Decoder) -> float:
    """Largest |scale * B| of all adapters; 0 for fresh ones, or none."""
    adapters = [linear.lora for linear in model.grouped_linears() if linear.lora is not None]
    if not adapters:
        return 0.0
    # One call for all of them: hundreds of small ones would take longer than the canary's answer.
    norms = torch._foreach_norm([b_OR.detach() for lora in adapters for b_OR in lora.lora_b], torch.inf)
    scales = [abs(lora.scale) for lora in adapters for _ in lora.lora_b]
    return max(scale * norm for scale, norm in zip(scales, torch.stack(norms).tolist(), strict=True))

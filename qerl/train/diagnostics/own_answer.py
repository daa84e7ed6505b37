"""The canary on a step's own answer: before every update, do the policy's adapters and its noise move the log-probs of what the engine has
just sampled, and do the engine's log-probs make that move?

One answer of the step is scored by the trainer as it was sampled, without adapters, and without noise, in passes of one shape, so that
two of them differ by what was left out and by nothing else. With e the engine's log-probs, t the trainer's and o those without the
adapters (or the noise), each token tells how much of the move from o to t the engine has made:

    share = sum of clip(sign(t - o) (e - o), -|t - o|, 3 |t - o|) / sum of |t - o|

1 where the engine samples what the trainer trains; 0 where it ignores the adapters (reads another noise key). What rounding adds to a
mean over N tokens is about r / sqrt(N); where moves are not well above that, nothing is concluded from the share. Nor is it where the move of
a token is not well above r: the least change lets a deep network round otherwise, so t and o differ by rounding, and the share of a sound
engine in that is a half or less (0.3 where t has twice the rounding of o), for any number of tokens.

The passes are small, so on a GPU they cost the time of launching them, unless the device is busy meanwhile: they are told to it behind the
gradient of the first micro-batch (``qerl.train.learn``), and read where the host waits anyway.

Legend: N answer tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qerl.config.schema import Config
from qerl.errors import TrainingError
from qerl.model.aqn import Noise
from qerl.model.attention import PackedSequences
from qerl.model.decoder import Decoder
from qerl.objective.batch import Sample, pack
from qerl.records import Completion, Rollout, TrainBatch
from qerl.train.diagnostics.canary import CERTAIN, DOUBT, GO_ON, MOVES_FROM, adapter_size, check_agreement
from qerl.train.diagnostics.passes import answer_logprobs
from qerl.train.diagnostics.probe import cut

TOKENS = {torch.float32: 8, torch.bfloat16: 128}
"""Compute type -> most answer tokens that are scored: the more rounding, the more are needed."""

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Compute type -> mean |log-prob of the engine - of the trainer| that rounding gives, at most."""
FP8_ROUNDING = 0.1
"""The same where the engine keeps keys or values in FP8."""

DOUBT_FROM, SURE_FROM = 6.0, 12.0
"""A move this many times what rounding adds to its mean is looked at, and is concluded from."""
CLEAR = 4.0
"""Nor is anything concluded from moves of less than so many times the rounding of a token."""
LEAST_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What leaving one thing out changes."""

    effect: float
    """Mean |change of log-probs| in the trainer, nats."""
    share: float
    """Of that, what the engine's log-probs make; 1 in a sound run, up to rounding. 0 without an effect."""
    standing: float
    """The effect over what rounding adds to a mean over so many tokens."""


def measure_move(engine_N: Tensor, now_N: Tensor, without_N: Tensor, rounding: float) -> Move:
    """The move of float64 log-probs [N] from ``without_N`` to ``now_N``, and the engine's part in it."""
    move_N = now_N - without_N
    size_N = move_N.abs()
    made_N = torch.minimum(torch.maximum(move_N.sign() * (engine_N - without_N), -size_N), 3 * size_N)
    effect, total = float(size_N.mean()), float(size_N.sum())
    return Move(
        effect=effect,
        share=float(made_N.sum()) / total if total else 0.0,
        standing=effect * math.sqrt(len(move_N)) / rounding,
    )


def choose_answer(completions: Sequence[Completion], tokens: int) -> Completion:
    """The answer that is scored, cut to ``tokens``: long enough if there is such, then of the shortest prompt, then the first."""
    best = min(completions, key=lambda c: (-min(len(c.token_ids), tokens), len(c.prompt.token_ids)))
    return cut(best, tokens)


class OwnAnswer:
    """The check of one step. Made before its updates; ``launch`` once the device has work, ``read`` before the first update.

    Args:
        config: temperature, size of passes, how keys and values are kept.
        model: the shared decoder.
        rollout: what the engine sampled.
        noise: what it sampled with.

    Attributes:
        metrics: of ``metrics/catalogue.py``; empty before ``read``.
    """

    def __init__(self, config: Config, model: Decoder, rollout: Rollout, noise: Noise | None):
        self.config, self.model, self.rollout, self.noise = config, model, rollout, noise
        self.metrics: dict[str, float] = {}
        self.size = adapter_size(model)
        self.rounding = ROUNDING[model.dtype] if config.rollout.kv_format == "compute" else FP8_ROUNDING
        # Packed, and asked for its lengths, here: both wait for the device.
        answer = choose_answer(rollout.completions, TOKENS[model.dtype])
        self._batch = self._pack([answer])
        self._context = self._batch.context()
        self._scores: dict[str, Tensor] = {}

    @torch.no_grad()
    def launch(self) -> None:
        """Tell the device to score the answer; waits for nothing."""
        self._scores = {cause: self._score(cause, self._batch, self._context) for cause in ("", *self._causes())}

    def read(self) -> None:
        """Take in the scores.

        Raises:
            TrainingError: adapters or noise change nothing in the trainer, or not in the engine, or the two disagree.
        """
        if not self._scores:
            self.launch()
        engine_N = self._batch.behavior_logprobs_N
        engine_N, *scores = torch.stack([engine_N, *self._scores.values()]).double().cpu()
        now_N, others = scores[0], dict(zip(self._causes(), scores[1:], strict=True))
        self._scores = {}
        if not all(bool(torch.isfinite(scored_N).all()) for scored_N in scores):
            # What is to become of such numbers is for ``optim.nonfinite`` to say.
            return
        difference = float((engine_N - now_N).abs().mean())
        self.metrics = {"canary/own/engine_difference": difference}
        self._check_agreement(difference)
        for cause, without_N in others.items():
            move = measure_move(engine_N, now_N, without_N, self.rounding)
            self.metrics[f"canary/own/{cause}_effect"] = move.effect
            if move.effect == 0.0 and self._must_move(cause, now_N):
                self._look_again(cause)
            if self._tells(move, DOUBT_FROM):
                self.metrics[f"canary/own/{cause}_share"] = move.share
                if move.share < LEAST_SHARE:
                    self._look_again(cause)

    @torch.no_grad()
    def _look_again(self, cause: str) -> None:
        """Stop the run if many answers say what one has said: a few tokens may be so certain that nothing shows in them."""
        batch = self._pack(self.rollout.completions)
        context = batch.context()
        now_N, without_N = (self._score(left_out, batch, context).double() for left_out in ("", cause))
        move = measure_move(batch.behavior_logprobs_N.double(), now_N, without_N, self.rounding)
        if move.effect == 0.0:
            raise self._fault(f"the trainer's log-probs do not change with the {cause}", move, len(now_N))
        if self._tells(move, SURE_FROM) and move.share < LEAST_SHARE:
            raise self._fault(f"the engine ignores the {cause}", move, len(now_N))

    def _tells(self, move: Move, least: float) -> bool:
        """Whether a move of this standing is large enough for its share to be the engine's, and not rounding's."""
        return move.standing >= least and move.effect >= CLEAR * ROUNDING[self.model.dtype]

    @torch.no_grad()
    def _check_agreement(self, difference: float) -> None:
        """As `check_agreement`; a few tokens may be unlikely ones, which rounding moves most, so many answers are asked then."""
        dtype, kv_format = self.model.dtype, self.config.rollout.kv_format
        try:
            check_agreement(difference, dtype, kv_format)
        except TrainingError:
            batch = self._pack(self.rollout.completions)
            now_N = self._score("", batch, batch.context())
            check_agreement(float((batch.behavior_logprobs_N - now_N).double().abs().mean()), dtype, kv_format)

    def _causes(self) -> tuple[str, ...]:
        """What the policy has that may be left out."""
        return ("adapters",) * (self.size > 0) + ("noise",) * (self.noise is not None)

    def _must_move(self, cause: str, now_N: Tensor) -> bool:
        """Whether leaving it out must show in the compute type, in one of these log-probs of an answer."""
        level, noise = MOVES_FROM[self.model.dtype], self.noise
        large = self.size >= level
        if cause == "noise":
            assert noise is not None
            large = noise.state.displacement >= 10 * level
            # The first token follows from the prompt alone.
            now_N = now_N[1:] if noise.state.prompt == "clean" else now_N
        return large and bool((now_N < -CERTAIN).any())

    def _pack(self, completions: Sequence[Completion]) -> TrainBatch:
        """As many of them, in order, as a pass takes."""
        samples = [Sample(completion=completion, advantage=0.0, in_loss=True) for completion in completions]
        return next(pack(samples, self.config.pass_tokens, self.model.device))

    def _score(self, left_out: str, batch: TrainBatch, context: PackedSequences) -> Tensor:
        """The trainer's log-probs [N] without one of ``_causes``, or with all of them."""
        return answer_logprobs(
            self.model,
            batch,
            self.config.rollout.temperature,
            None if left_out == "noise" else self.noise,
            adapters=left_out != "adapters",
            context=context,
        )

    def _fault(self, what: str, move: Move, tokens: int) -> TrainingError:
        sizes = [f"largest adapter entry {self.size:.3g}"]
        if self.noise is not None:
            sizes.append(f"noise of sigma {self.noise.state.sigma:.3g}")
        return TrainingError(
            f"canary: {what}",
            got=f"{', '.join(sizes)}; the trainer's log-probs of {tokens} answer tokens move by {move.effect:.3g} nats each, the engine's by {round(100 * move.share)} % of that",
            expected="log-probs that move, the engine's as the trainer's do",
            remedy=f"{DOUBT}. {GO_ON}",
        )

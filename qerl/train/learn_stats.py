"""Sums gathered during the learning pass, and the metrics made of them.

Legend: N answer tokens of a micro-batch.

Two kinds of figure are kept apart. Loss figures (clip shares, ratio, KL) cover every update and only tokens that are in
the loss. Mismatch figures and the entropy cover every answer token of the mini-batches before the first update, where the
parameters are still the ones that sampled: there the difference between trainer and engine is rounding, and noise when it is absent
from the trainer's pass, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qerl.objective.importance import ImportanceWeights
from qerl.objective.loss import Surrogate
from qerl.records import TrainBatch


@dataclass(slots=True)
class LearnStats:
    """Accumulator of one rollout's updates. Sums stay on the device as float64 until :meth:`metrics` reads them."""

    grad_norms: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    skipped_updates: int = 0
    nonfinite_updates: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)
    extremes: dict[str, Tensor] = field(default_factory=dict)

    def add_update(self, grad_norm: float, lr: float) -> None:
        self.grad_norms.append(grad_norm)
        self.learning_rates.append(lr)

    def add_micro_batch(
        self,
        batch: TrainBatch,
        logprobs_N: Tensor,
        entropy_N: Tensor,
        result: Surrogate,
        importance: ImportanceWeights | None,
        *,
        on_policy: bool,
    ) -> None:
        """Add one micro-batch; ``on_policy`` says that no update of the rollout has been made yet."""
        self._add("loss", result.loss.detach())
        in_loss_N = batch.loss_mask_S[batch.sequence_N]
        self._add("loss_tokens", in_loss_N)
        self._add("ratio", result.ratio_N * in_loss_N)
        ratio_N = result.ratio_N[in_loss_N]
        if ratio_N.numel():
            self._extreme("ratio_min", ratio_N.min(), torch.minimum)
            self._extreme("ratio_max", ratio_N.max(), torch.maximum)
        self._add("clip_low", result.low_clipped_N & in_loss_N)
        self._add("clip_high", result.high_clipped_N & in_loss_N)
        if result.dual_clipped_N is not None:
            self._add("clip_dual", result.dual_clipped_N & in_loss_N)
        if result.kl_N is not None:
            self._add("kl", result.kl_N * in_loss_N)
        if importance is not None:
            self._add_importance(importance, in_loss_N if importance.level == "token" else batch.loss_mask_S)
        if not on_policy:
            return
        difference_N = logprobs_N - batch.behavior_logprobs_N
        weight_N = torch.exp(difference_N)
        self._add("tokens", torch.ones_like(difference_N))
        self._add("entropy", entropy_N)
        self._add("abs_difference", difference_N.abs())
        prob_difference_N = (logprobs_N.exp() - batch.behavior_logprobs_N.exp()).abs()
        self._add("abs_prob_difference", prob_difference_N)
        self._extreme("abs_prob_difference_max", prob_difference_N.max(), torch.maximum)
        self._add("mismatch_kl", weight_N - 1.0 - difference_N)
        self._add("weight", weight_N)
        self._add("weight_squared", weight_N.double() ** 2)
        self._extreme("abs_difference_max", difference_N.abs().max(), torch.maximum)
        self._extreme("weight_min", weight_N.min(), torch.minimum)
        self._extreme("weight_max", weight_N.max(), torch.maximum)

    def _add_importance(self, importance: ImportanceWeights, in_loss_U: Tensor) -> None:
        self._add("importance_units", in_loss_U)
        self._add("importance", importance.unit_U * in_loss_U)
        self._add("importance_affected", importance.affected_U & in_loss_U)
        # Weights are not negative, so 0 for the units outside the loss changes no maximum.
        self._extreme("importance_max", (importance.unit_U * in_loss_U).max(), torch.maximum)

    def _add(self, name: str, values_N: Tensor) -> None:
        total = values_N.double().sum()
        self.sums[name] = self.sums[name] + total if name in self.sums else total

    def _extreme(self, name: str, value: Tensor, choose: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.extremes[name] = choose(self.extremes[name], value) if name in self.extremes else value

    def metrics(self) -> dict[str, float]:
        """Metrics of ``metrics/catalogue.py`` made from the sums; means over nothing are left out."""
        sums = {name: value.item() for name, value in self.sums.items()}
        extremes = {name: value.item() for name, value in self.extremes.items()}
        tokens = sums.get("tokens", 0.0)
        updates = len(self.grad_norms)
        result = {
            "loss": sums.get("loss", 0.0) / max(updates + self.skipped_updates + self.nonfinite_updates, 1),
            "updates": updates,
            "skipped_updates": self.skipped_updates,
            "nonfinite_updates": self.nonfinite_updates,
        }
        if self.grad_norms:
            result["grad_norm"] = math.fsum(self.grad_norms) / len(self.grad_norms)
            result["learning_rate"] = self.learning_rates[-1]
        if sums.get("loss_tokens"):
            low, high = sums["clip_low"] / sums["loss_tokens"], sums["clip_high"] / sums["loss_tokens"]
            result["clip_ratio/low_mean"] = low
            result["clip_ratio/high_mean"] = high
            result["clip_ratio/region_mean"] = low + high
            if "clip_dual" in sums:
                result["clip_ratio/dual_mean"] = sums["clip_dual"] / sums["loss_tokens"]
            result["ratio/mean"] = sums["ratio"] / sums["loss_tokens"]
            result["ratio/min"] = extremes["ratio_min"]
            result["ratio/max"] = extremes["ratio_max"]
            if "kl" in sums:
                result["kl"] = sums["kl"] / sums["loss_tokens"]
        if sums.get("importance_units"):
            result["importance_weight/mean"] = sums["importance"] / sums["importance_units"]
            result["importance_weight/max"] = extremes["importance_max"]
            result["importance_weight/affected"] = sums["importance_affected"] / sums["importance_units"]
        if tokens:
            result["entropy"] = sums["entropy"] / tokens
            result["sampling/sampling_logp_difference/mean"] = sums["abs_difference"] / tokens
            result["sampling/sampling_logp_difference/max"] = extremes["abs_difference_max"]
            result["sampling/importance_sampling_ratio/mean"] = sums["weight"] / tokens
            result["sampling/importance_sampling_ratio/min"] = extremes["weight_min"]
            result["sampling/importance_sampling_ratio/max"] = extremes["weight_max"]
            result["mean_abs_prob_difference"] = sums["abs_prob_difference"] / tokens
            result["max_abs_prob_difference"] = extremes["abs_prob_difference_max"]
            result["mismatch_kl"] = sums["mismatch_kl"] / tokens
            result["effective_sample_size"] = sums["weight"] ** 2 / (sums["weight_squared"] * tokens)
        return result

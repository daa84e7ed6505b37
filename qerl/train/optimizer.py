"""AdamW on float32 masters, warm-up and decay as a function of completed updates, gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch.nn import Parameter

from qerl.config.schema import OptimConfig
from qerl.errors import TrainingError


def make_optimizer(parameters: Mapping[str, Parameter], config: OptimConfig) -> torch.optim.AdamW:
    """AdamW with two groups: LoRA matrices (decayed) and one-dimensional norm scales (never decayed).

    Args:
        parameters: name -> float32 parameter; the order fixes the layout of the saved state.
        config: learning rate (peak), betas, eps, weight decay.
    """
    matrices = [parameter for parameter in parameters.values() if parameter.dim() >= 2]
    scales = [parameter for parameter in parameters.values() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": scales, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps
    )


def learning_rate(completed: int, planned: int, config: OptimConfig) -> float:
    """Learning rate of the next update.

    Linear warm-up over W = round(warmup_ratio * planned) updates, lr * (u + 1) / W for u < W, so that no update is
    spent at 0; then ``cosine``: lr * (1 + cos(pi * (u - W) / (planned - W))) / 2, or ``constant``.

    Args:
        completed: updates made so far, u.
        planned: updates of the whole run.
    """
    warmup = round(config.warmup_ratio * planned)
    if completed < warmup:
        return config.lr * (completed + 1) / warmup
    if config.schedule == "constant":
        return config.lr
    progress = (completed - warmup) / max(planned - warmup, 1)
    return config.lr * 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))


def apply_update(optimizer: torch.optim.Optimizer, lr: float, max_grad_norm: float, update: int) -> float:
    """Clip the global gradient norm, take one step, clear the gradients.

    Returns:
        The gradient norm before clipping.

    Raises:
        TrainingError: the norm is not finite; parameters are left untouched.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm))
    if not math.isfinite(norm):
        raise TrainingError(
            f"the gradient of update {update} is not finite",
            got=f"norm {norm}",
            remedy="Lower optim.lr, or look at the last rollout under rollouts/ for degenerate answers",
        )
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm

"""AdamW on float32 masters, warm-up and decay as a function of completed updates, gradient clipping.

A parameter that is float32 itself (adapters, norms, everything when ``model.dtype`` is float32) is its own master. One in a
narrower type (the weights in full mode) has a float32 master beside it: gradients of micro-batches are added up in float32,
the update changes the master, and the parameter becomes the master rounded once.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from qerl.config.schema import OptimConfig
from qerl.errors import MissingDependencyError


class MasterOptimizer:
    """An optimizer over the masters of given parameters.

    Args:
        parameters: name -> parameter; the order fixes the layout of the saved state. Gradients of parameters that have a
            master of their own are moved to it as they arise, as long as the optimizer lives.
        config: name, learning rate (peak), betas, eps, weight decay.

    Attributes:
        inner: the optimizer, over masters: matrices (decayed), and one-dimensional scales and biases (never decayed).
        masters: parameter -> float32 master, of the parameters that are not float32 themselves.
        trained: name -> what is optimized: the master, or the parameter itself.

    Raises:
        MissingDependencyError: ``optim.name`` needs a package that is not installed.
    """

    def __init__(self, parameters: Mapping[str, Parameter], config: OptimConfig):
        self.masters: dict[Parameter, Parameter] = {}
        hooks = []
        for parameter in parameters.values():
            if parameter.dtype != torch.float32:
                master = self.masters[parameter] = Parameter(parameter.detach().to(torch.float32))
                # A hook that knew the optimizer would keep parameter, masters and moments for ever: the garbage collector does not
                # follow a parameter to its hooks.
                hooks.append(parameter.register_post_accumulate_grad_hook(partial(_move_gradient, master)))
        weakref.finalize(self, _remove, hooks)
        self.trained = {name: self.masters.get(parameter, parameter) for name, parameter in parameters.items()}
        trained = list(self.trained.values())
        groups = [
            {"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.inner = _adamw([group for group in groups if group["params"]], config)

    def parameters(self) -> list[Parameter]:
        """What the optimizer changes: float32 all."""
        return [parameter for group in self.inner.param_groups for parameter in group["params"]]

    def step(self, lr: float) -> None:
        """One update at the given learning rate; parameters follow their masters."""
        for group in self.inner.param_groups:
            group["lr"] = lr
        self.inner.step()
        # bitsandbytes writes past torch's version counters, by which copies of the masters know that they are old.
        increment_version(self.parameters())
        self._follow()

    @torch.no_grad()
    def _follow(self) -> None:
        for parameter, master in self.masters.items():
            parameter.copy_(master)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.inner.zero_grad(set_to_none=True)

    def state_tensors(self) -> Iterable[Tensor]:
        """The moments and their scales, as they are held; empty before the first update."""
        for state in self.inner.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value) and value.dim() > 0)

    def state_dict(self) -> dict[str, Any]:
        """What torch's optimizer gives, and under ``masters`` those weights, if there are any."""
        masters = [master.detach() for master in self.masters.values()]
        return self.inner.state_dict() | ({"masters": masters} if masters else {})

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave, and let the parameters follow.

        Raises:
            ValueError: it is of another optimizer or other parameters.
        """
        saved = state.get("masters", [])
        shapes = [tuple(master.shape) for master in self.masters.values()]
        if [tuple(master.shape) for master in saved] != shapes:
            raise ValueError(f"{len(saved)} master weights for {len(shapes)} parameters, or of other shapes")
        self.inner.load_state_dict({key: value for key, value in state.items() if key != "masters"})
        for master, values in zip(self.masters.values(), saved, strict=True):
            master.copy_(values)
        self._follow()


def _move_gradient(master: Parameter, parameter: Tensor) -> None:
    """Add the gradient that has arisen to the master's, in float32."""
    assert parameter.grad is not None
    if master.grad is None:
        master.grad = parameter.grad.to(torch.float32)
    else:
        master.grad.add_(parameter.grad)
    parameter.grad = None


def _remove(hooks: Iterable[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _adamw(groups: list[dict[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
    settings: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    if config.name == "adamw":
        # The fused kernel needs no temporaries; on the CPU the plain loop is the reference.
        on_cuda = all(parameter.is_cuda for group in groups for parameter in group["params"])
        return torch.optim.AdamW(groups, **settings, fused=on_cuda)
    return _adamw_8bit()(groups, **settings)


def _adamw_8bit() -> Callable[..., torch.optim.Optimizer]:
    """The class of bitsandbytes."""
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError:
        raise MissingDependencyError(
            "optim.name=adamw_8bit needs a package that is not installed",
            got="no bitsandbytes",
            remedy="pip install bitsandbytes, or use optim.name=adamw",
        ) from None
    return AdamW8bit


def check_optimizer(config: OptimConfig) -> None:
    """Look for what an optimizer needs, before there is anything to optimize.

    Raises:
        MissingDependencyError: ``optim.name`` needs a package that is not installed.
    """
    if config.name == "adamw_8bit":
        _adamw_8bit()


def make_optimizer(parameters: Mapping[str, Parameter], config: OptimConfig) -> MasterOptimizer:
    """The optimizer that ``optim.name`` names, over ``parameters``."""
    return MasterOptimizer(parameters, config)


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


def apply_update(optimizer: MasterOptimizer, lr: float, max_grad_norm: float) -> float:
    """Clip the global gradient norm and take one step, if it is finite; clear the gradients.

    Returns:
        The gradient norm before clipping. When it is not finite no parameter has changed, and the gradients, not cleared, can be
        looked at.
    """
    norm = float(torch.nn.utils.clip_grad_norm_(optimizer.parameters(), max_grad_norm))
    if math.isfinite(norm):
        optimizer.step(lr)
        optimizer.zero_grad()
    return norm

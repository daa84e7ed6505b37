"""What the backward pass finds kept, and what it computes or fetches again.

Three ways (``train.checkpointing``), from most memory to least; gradients are the same numbers:

* ``none``: everything autograd asks for is kept;
* ``selective``: the inputs of the linear layers that a cheap operation gives (the norm's output, the gated activation) are
  computed again from what that operation keeps anyway; no matrix product is repeated;
* ``full``: only the residual stream before each layer is kept, and the layer runs again, without its last product.

With ``full``, the kept streams may wait in the host's memory (``train.activation_offloading``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

Checkpointing: TypeAlias = Literal["none", "selective", "full"]


def made_again(value: Tensor, make: Callable[[], Tensor]) -> AbstractContextManager[object]:
    """Inside, an operation that would keep ``value`` for its backward pass keeps ``make`` instead, which gives it again.

    Args:
        value: input of the operation; nothing else is touched.
        make: must return the same numbers without holding ``value``.
    """
    address, shape = value.data_ptr(), value.shape

    def pack(kept: Tensor) -> Tensor | Callable[[], Tensor]:
        return make if kept.data_ptr() == address and kept.shape == shape else kept

    def unpack(packed: Tensor | Callable[[], Tensor]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with torch.no_grad():
            return packed()

    return saved_tensors_hooks(pack, unpack)


class FirstAndAgain:
    """A function for ``torch.utils.checkpoint``, which is called for its output and then again for what its backward pass needs.

    Args:
        run: called with ``output=True`` first and ``output=False`` after that.
    """

    def __init__(self, run: Callable[..., Tensor]):
        self.run = run
        self._called = False

    def __call__(self, *arguments: Any) -> Tensor:
        first, self._called = not self._called, True
        return self.run(*arguments, output=first)


def kept_on_host(device: torch.device) -> AbstractContextManager[object]:
    """Inside, what autograd keeps is moved to the host's memory (pinned where the device is a GPU) and fetched back."""
    return save_on_cpu(pin_memory=device.type == "cuda")


def kept_here() -> AbstractContextManager[object]:
    """Inside, nothing changes."""
    return nullcontext()

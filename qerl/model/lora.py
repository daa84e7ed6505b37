"""Low-rank adapters of one fused group of projections: y_i += (alpha / r) * B_i (A_i x).

Shape legend: I input width, O output rows, R rank, N targeted projections of the group.

Master weights are float32, and so are gradients and optimizer state. The products read copies in the compute type that stay in
one place: they are refreshed, in place, when a master has changed, so that a captured CUDA graph reads current values. B starts at zero, so a fresh adapter changes nothing. The A of a group are one stacked parameter: its members
read the same input, so one product shrinks for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qerl.kernels import philox
from qerl.kernels.fp4_linear import AdapterPart, AdapterParts

INIT_STREAM = "lora_init"


class LoraGroup(nn.Module):
    """Adapters of the targeted members of one group.

    Args:
        names: full names of the targeted projections, e.g. ``layers.0.self_attn.q_proj``.
        rows: output rows (start, stop) of each in the stacked group.
        in_features: I.
        rank, alpha: R and the scale numerator.
        seed: root of the initialization, which is keyed by name and so does not depend on order.

    Attributes:
        lora_a: float32 [N * R, I], member i in rows i*R .. (i+1)*R.
        lora_b: N float32 parameters [O_i, R].
        scale: alpha / rank.
    """

    def __init__(
        self,
        names: Sequence[str],
        rows: Sequence[tuple[int, int]],
        in_features: int,
        *,
        rank: int,
        alpha: float,
        seed: int,
        device: torch.device | str = "cpu",
    ):
        super().__init__()
        self.names = tuple(names)
        self.rows = tuple(rows)
        self.rank = rank
        self.scale = alpha / rank
        self.lora_a = nn.Parameter(
            torch.cat([initial_a(name, rank, in_features, seed=seed, device=device) for name in self.names])
        )
        self.lora_b = nn.ParameterList(
            nn.Parameter(torch.zeros(stop - start, rank, device=device)) for start, stop in self.rows
        )
        self._masters = (self.lora_a, *self.lora_b)
        """All of them: a tuple, since modules and lists of modules take the host as long as a launch to name what they hold."""
        self._copies: dict[torch.dtype, tuple[Tensor, ...]] = {}
        self._states: dict[torch.dtype, list[tuple[int, int]]] = {}
        self._parts: dict[torch.dtype, AdapterParts] = {}
        """Of copies, which keep their place."""

    def adapter_parts(self, dtype: torch.dtype) -> AdapterParts:
        """The adapters in compute type ``dtype``, one part a targeted projection; all share one stacked A.

        Where that is not the masters' own type, the tensors are copies that keep their place; those of masters that changed since
        the last call are refreshed. Gradients reach the masters.
        """
        tensors = self._current(dtype)
        if tensors is not self._copies.get(dtype):
            return self._parts_of(tensors)
        if dtype not in self._parts:
            self._parts[dtype] = self._parts_of(tensors)
        return self._parts[dtype]

    def _parts_of(self, tensors: tuple[Tensor, ...]) -> AdapterParts:
        a_RI, *b_OR = tensors
        return AdapterParts(
            AdapterPart(
                start=start,
                stop=stop,
                a_RI=a_RI,
                b_OR=b,
                scale=self.scale,
                rank_start=index * self.rank,
            )
            for index, ((start, stop), b) in enumerate(zip(self.rows, b_OR, strict=True))
        )

    def refresh(self, *, force: bool = False) -> None:
        """Bring the copies up to date: what a replayed graph needs after an update of the masters. ``force``: see `stale_copies`."""
        for copy, master in self.stale_copies(force=force):
            copy.copy_(master)

    def stale_copies(self, *, force: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        """(copy, master) of every copy whose master has changed, for the caller to copy: taken to be up to date from then on.

        Args:
            force: also copies whose master shows no change, for updates that torch does not count (through ``.data``).
        """
        found = [(master.data_ptr(), master._version) for master in self._masters]
        for dtype, copies in self._copies.items():
            known = self._states[dtype]
            if known == found and not force:
                continue
            for index, (master, copy) in enumerate(zip(self._masters, copies, strict=True)):
                if force or known[index] != found[index]:
                    known[index] = found[index]
                    yield copy, master.detach()

    def copies(self) -> tuple[Tensor, ...]:
        """All copies that there are."""
        return tuple(copy for copies in self._copies.values() for copy in copies)

    def _current(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        masters = self._masters
        if all(master.dtype == dtype for master in masters):
            return masters
        if dtype not in self._copies:
            self._copies[dtype] = tuple(torch.empty_like(master, dtype=dtype) for master in masters)
            self._states[dtype] = [(0, -1)] * len(masters)
        self.refresh()
        copies = self._copies[dtype]
        if not torch.is_grad_enabled():
            return copies
        return _Copies.apply(*masters, *copies)

    def matrices(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Projection name -> (A [R, I], B [O, R]), views of the parameters."""
        return {
            name: (a_RI, b_OR)
            for name, a_RI, b_OR in zip(self.names, self.lora_a.split(self.rank), self.lora_b, strict=True)
        }


def initial_a(name: str, rank: int, in_features: int, *, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """A of one projection at the start: U(-1/sqrt(I), 1/sqrt(I)), which is PEFT's Kaiming rule. float32 [R, I]."""
    unit = philox.uniform(seed, f"{INIT_STREAM}/{name}", rank * in_features, device=device)
    return ((2.0 * unit - 1.0) * in_features**-0.5).view(rank, in_features)


class _Copies(torch.autograd.Function):
    """The copies of masters, as functions of the masters: one call for a group, since each is as long for the host as a launch."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        masters, copies = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
        ctx.dtypes = [master.dtype for master in masters]
        ctx.set_materialize_grads(False)
        return tuple(copy.view_as(copy) for copy in copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        wide = [
            None if grad is None else torch.empty_like(grad, dtype=dtype)
            for grad, dtype in zip(grads, ctx.dtypes, strict=True)
        ]
        given = [grad for grad in grads if grad is not None]
        torch._foreach_copy_([one for one in wide if one is not None], given)
        return *wide, *[None] * len(grads)

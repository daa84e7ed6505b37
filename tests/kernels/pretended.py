"""An H200 as far as the choices of linear layers ask for one: nothing is compiled, and nothing runs."""

from types import SimpleNamespace

import torch

from qerl.kernels.fp4_linear import decode, dense, kept, middle, regimes


class Space(SimpleNamespace):
    """Stands in for a workspace: one is another than the next."""

    __hash__ = object.__hash__


def pretend(monkeypatch):
    """Linear layers on the CPU choose as on an H200; gives their workspace."""
    space = Space(
        device=torch.device("cpu"), multiprocessors=132, shared_limit=232448, geometries={},
        resident_clusters=lambda launch: 66, alphas=lambda weight: (1.0,) * len(weight.segments),
        counters=lambda: torch.zeros(1, dtype=torch.int32), sums=lambda numbers: torch.empty(numbers),
    )  # fmt: skip
    for module in (kept, decode, middle, dense):
        monkeypatch.setattr(module, "workspace", lambda device: space)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: regimes.HOPPER)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return space

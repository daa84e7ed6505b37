"""Where noise enters: the places of a model, their numbers in the Philox counter, and the layout of that counter.

A *site* is a norm that may be named in ``aqn.sites``. A *place* is (layer, name): one draw. Its name is that of a norm, or
``norm/projection`` where every projection that reads the norm has a draw of its own (``aqn.sharing=independent``).

Counter of the draw of one channel: c0 = channel // 4 (a block of four words gives four normals),
c1 = name | layer << 4 | position << 12, c2 = scope key, c3 = rollout index. Position is 0 except in scope ``token``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from qerl.errors import ConfigError
from qerl.model.spec import ModelSpec

Place = tuple[int, str]
"""(layer, name); the final norm is layer ``spec.num_layers``."""

SITE_IDS = {
    "attn_norm": 0,
    "mlp_norm": 1,
    "final_norm": 2,
    "q_norm": 3,
    "k_norm": 4,
    "attn_norm/q_proj": 5,
    "attn_norm/k_proj": 6,
    "attn_norm/v_proj": 7,
    "mlp_norm/gate_proj": 8,
    "mlp_norm/up_proj": 9,
}
"""Name of a place -> its number in the counter. Part of the meaning of a recorded noise state: never renumber."""

READERS = {"attn_norm": ("q_proj", "k_proj", "v_proj"), "mlp_norm": ("gate_proj", "up_proj")}
"""Norm -> the projections that read it."""

LAYER_SHIFT, POSITION_SHIFT = 4, 12
MAX_LAYERS = 1 << (POSITION_SHIFT - LAYER_SHIFT)
MAX_POSITIONS = 1 << (32 - POSITION_SHIFT)


class NormSource(Protocol):
    """What noise needs of a model."""

    spec: ModelSpec

    def norm_weight(self, layer: int, site: str) -> Tensor:
        """Clean scale of one norm, float32 [D]; the final norm is layer ``spec.num_layers``."""
        ...


def places(sites: Sequence[str], sharing: str, spec: ModelSpec) -> list[Place]:
    """All places of a model that carry noise, by layer.

    Args:
        sites: values of ``aqn.sites``.
        sharing: ``shared`` or ``independent``.
        spec: which norms the model has.

    Raises:
        ConfigError: a site that is unknown or that the model does not have, or a model beyond the counter's layout.
    """
    names = [name for site in sites if site != "final_norm" for name in _names(site, sharing, spec)]
    found = [(layer, name) for layer in range(spec.num_layers) for name in names]
    if "final_norm" in sites:
        found.append((spec.num_layers, "final_norm"))
    if spec.num_layers >= MAX_LAYERS or spec.max_positions > MAX_POSITIONS:
        raise ConfigError(
            "this model is beyond the layout of noise keys",
            got=f"{spec.num_layers} layers, {spec.max_positions} positions",
            expected=f"fewer than {MAX_LAYERS} layers and at most {MAX_POSITIONS} positions",
            remedy="Set aqn.enabled=false.",
        )
    return found


def _names(site: str, sharing: str, spec: ModelSpec) -> tuple[str, ...]:
    if site == "qk_norm" and spec.qk_norm:
        return "q_norm", "k_norm"
    if site not in READERS:
        raise ConfigError(
            "aqn.sites names a norm that this model does not have",
            got=f"{site} ({spec.architecture})",
            expected="norms among attn_norm, mlp_norm, final_norm" + (", qk_norm" if spec.qk_norm else ""),
        )
    return tuple(f"{site}/{reader}" for reader in READERS[site]) if sharing == "independent" else (site,)


def norm_of(place: Place) -> Place:
    """(layer, norm) whose scale a place perturbs."""
    layer, name = place
    return layer, name.partition("/")[0]


def clean_weight(model: NormSource, place: Place) -> Tensor:
    """Clean scale of a place's norm as it is now, detached, float32 [D]."""
    return model.norm_weight(*norm_of(place)).detach()

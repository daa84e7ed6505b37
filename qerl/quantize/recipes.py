"""What each method does to a layer, as a list of switches."""

from __future__ import annotations

from dataclasses import dataclass

from qerl.errors import ConfigError, nearest
from qerl.formats import get_format


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Steps of one method, in the order in which they run."""

    fold: bool = False
    """Search channel scales and fold them into norms and preceding projections (AWQ)."""
    scales: str = "rtn"
    """How block scales are chosen from the weight alone: a method of the format."""
    clip: bool = False
    """Then choose each block's scale by the error that it leaves in the layer's output."""
    feedback: bool = False
    """Choose the codes with error feedback (GPTQ) instead of rounding each to the nearest."""

    @property
    def calibrated(self) -> bool:
        """Whether it looks at activations."""
        return self.fold or self.clip or self.feedback


RECIPES: dict[str, Recipe] = {
    "rtn": Recipe(),
    "mse": Recipe(scales="mse"),
    "four_over_six": Recipe(scales="four_over_six"),
    "awq": Recipe(fold=True, scales="mse", clip=True),
    "gptq": Recipe(scales="mse", feedback=True),
    "best": Recipe(fold=True, scales="mse", clip=True, feedback=True),
}
"""Method -> what it does."""


def get_recipe(method: str, format_name: str) -> Recipe:
    """The recipe of a method on a format.

    Raises:
        ConfigError: no such method, or the format's scales cannot be chosen in that way, or it does not quantize.
    """
    if method not in RECIPES:
        close = nearest(method, RECIPES)
        raise ConfigError(
            "unknown quantizer",
            got=f"method={method}",
            expected="one of " + ", ".join(RECIPES),
            remedy=f"Did you mean {close}?" if close else None,
        )
    recipe, known = RECIPES[method], get_format(format_name).methods
    if recipe.scales not in known or (recipe.calibrated and format_name == "bf16"):
        usable = [name for name, other in RECIPES.items() if other.scales in known]
        raise ConfigError(
            f"format {format_name} cannot be quantized by this method",
            got=f"method={method}",
            expected="one of " + ", ".join(usable if format_name != "bf16" else known),
        )
    return recipe

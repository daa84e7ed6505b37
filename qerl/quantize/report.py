"""What `quality.json` says, for people: a few facts and two tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.units import bytes_text

if TYPE_CHECKING:
    from rich.table import Table


def facts(quality: Mapping[str, Any]) -> dict[str, str]:
    """Heading -> value."""
    total = quality["total"]
    lines = {
        "format": f"{quality['format']}, {quality['method']}, {quality['rounding']} rounding",
        "error": f"{total['relative_error']:.2%} of the weights, worst in {total['worst']}",
        "size": f"{bytes_text(total['bytes'])} of {bytes_text(total['dense_bytes'])} of the linear layers, in {total['tensors']} tensors; "
        f"{total['bytes_per_weight']:.4f} bytes a weight, {total['over_ideal']:.4f} times NVFP4's ideal 9/16",
    }
    if quality["calibration"] is not None:
        text = quality["calibration"]
        lines["calibration"] = f"{text['count']} x {text['length']} tokens of {text['source']}:{text['split']}"
    model = quality["model"]
    if model is not None:
        lines["KL"] = (
            f"{model['kl']:.4f}{_error(model['kl_standard_error'])} nats a token, over {model['tokens']} tokens"
        )
        lines["top-1"] = f"{model['top1_agreement']:.1%} agree with the plain model"
        lines["perplexity"] = f"{model['plain_perplexity']:.3f} -> {model['perplexity']:.3f}"
        rises = f"higher on {model['entropy_rises']}, lower on {model['entropy_falls']} of {model['sequences']} texts"
        change = "" if model["entropy_change"] is None else f" ({model['entropy_change']:+.1%})"
        lines["entropy"] = f"{model['plain_entropy']:.4f} -> {model['entropy']:.4f} nats{change}; {rises}"
    return lines


def files_size(folder: Path) -> str:
    """Bytes of the weights of a checkpoint, of whatever kind."""
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return f"{bytes_text(size)} of safetensors, with embeddings, norms and whatever else is not quantized"


def table(quality: Mapping[str, Any]) -> Table:
    """Errors by projection, all layers together; `quality.json` has every tensor."""
    from rich.table import Table

    shown = Table("projection", title="error of the weights", title_justify="left")
    for heading in ("tensors", "relative error", "SQNR", "worst", "in layer"):
        shown.add_column(heading, justify="right")
    groups: dict[str, dict[str, Mapping[str, Any]]] = {}
    for name, tensor in quality["tensors"].items():
        groups.setdefault(name.split(".")[-2], {})[name.split(".")[2]] = tensor
    for projection, layers in groups.items():
        mean = math.sqrt(sum(tensor["relative_error"] ** 2 for tensor in layers.values()) / len(layers))
        worst = max(layers, key=lambda layer: layers[layer]["relative_error"])
        decibels = f"{-20 * math.log10(mean):.1f} dB" if mean > 0 else "exact"
        shown.add_row(
            projection, f"{len(layers)}", f"{mean:.2%}", decibels, f"{layers[worst]['relative_error']:.2%}", worst
        )
    return shown


def _error(value: float | None) -> str:
    return "" if value is None else f" ± {value:.4f}"

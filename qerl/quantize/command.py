"""`qerl quantize` without its terminal: options as they were given, checked and turned into a call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from qerl.config.schema import Config, QuantConfig
from qerl.errors import ConfigError
from qerl.metrics.files import check_writable
from qerl.quantize.driver import Progress, TextRequest, quantize_checkpoint
from qerl.quantize.recipes import RECIPES, get_recipe
from qerl.quantize.texts import split_fields

ACTIVATIONS = ("memory", "disk")


def quantize_command(
    model: Path,
    out: Path,
    config: Config,
    *,
    device: torch.device,
    method: str | None,
    calibration: str | None,
    calibration_count: int,
    calibration_length: int,
    report_data: str | None,
    report_count: int,
    report_length: int,
    text_fields: str,
    activations: str,
    progress: Progress,
) -> dict[str, Any]:
    """Write a quantized checkpoint; returns what `quality.json` holds.

    Args:
        model, out: folders.
        config: `quant.format`, `quant.rounding` and `model.dtype` are used; other settings that would change what is written
            are refused.
        device: where layers run.
        method: None takes `quant.method`.
        calibration, calibration_count, calibration_length: text for the methods that need it.
        report_data, report_count, report_length: text on which the model is compared with the plain one; rows are cut at that many tokens.
        text_fields: fields of a row that hold its text, joined by commas.
        activations: one of `ACTIVATIONS`.
        progress: see `quantize_checkpoint`.

    Raises:
        ConfigError: options that make no sense together.
        OutputError: ``out`` cannot be written; checked first.
        QerlError: see `quantize_checkpoint`.
    """
    quant = config.quant
    check_writable(out, folder=True)
    _refuse_settings_of_loading(quant)
    if activations not in ACTIVATIONS:
        raise ConfigError("--activations is unknown", got=activations, expected=" or ".join(ACTIVATIONS))
    chosen = method or quant.method
    if calibration is not None and not get_recipe(chosen, quant.format).calibrated:
        raise ConfigError(
            f"--calibration does nothing for the method {chosen}, which looks at weights alone",
            got=f"--method {chosen} --calibration {calibration}",
            expected=f"a method that is calibrated: {', '.join(name for name, recipe in RECIPES.items() if recipe.calibrated)}",
            remedy="Leave --calibration out, or choose such a method",
        )
    fields = split_fields(text_fields)
    texts = {
        "calibration": (calibration, calibration_count, calibration_length),
        "report": (report_data, report_count, report_length),
    }
    requests = {
        key: None if name is None else TextRequest(name=name, count=count, length=length, fields=fields)
        for key, (name, count, length) in texts.items()
    }
    return quantize_checkpoint(
        model,
        out,
        format=quant.format,
        method=chosen,
        rounding=quant.rounding,
        calibration=requests["calibration"],
        report=requests["report"],
        device=device,
        dtype=getattr(torch, config.model.dtype),
        activations=activations,
        progress=progress,
    )


def _refuse_settings_of_loading(quant: QuantConfig) -> None:
    plain = QuantConfig()
    for key in ("overrides", "lm_head", "double_quant"):
        if getattr(quant, key) != getattr(plain, key):
            raise ConfigError(
                f"quant.{key} is about quantizing at load and does not change a written checkpoint",
                got=f"quant.{key}={getattr(quant, key)}",
                remedy="Leave it out here; give it to `qerl train`.",
            )

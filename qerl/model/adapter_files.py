"""Adapters on disk, in PEFT's format: ``adapter_model.safetensors`` and ``adapter_config.json``.

``PeftModel.from_pretrained`` loads a folder written here onto the plain model. Trained norms travel as PEFT's
``modules_to_save``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qerl.config.schema import PROJECTIONS, LoraConfig
from qerl.errors import CheckpointError
from qerl.formats.tensor_file import save_tensors
from qerl.model.decoder import LAYER_NORMS, Decoder
from qerl.model.spec import read_json_object
from qerl.model.tensor_folder import TensorFile

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
PREFIX = "base_model.model.model"
NORM_NAMES = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}

PLAIN_SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
}
"""Settings of an adapter file that change what it means, with the values that mean plain LoRA."""


def save_adapter(model: Decoder, folder: str | Path, *, base_path: str, lora: LoraConfig) -> None:
    """Write the adapters, and the layer norms when they are trained, as float32 in PEFT's format.

    Args:
        model: its current parameters are written.
        folder: made if missing; each file appears whole or not at all, the config last.
        base_path: what ``base_model_name_or_path`` shall say.
        lora: the settings that the model was loaded with.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in _lora_tensors(model).items()}
    if lora.train_norms:
        tensors |= {name: tensor.detach().cpu() for name, tensor in _norm_tensors(model).items()}
    part = folder / f"{ADAPTER_FILE}.part"
    # Rows of the stacked A share storage; safetensors wants each tensor to own its own.
    save_tensors({name: tensor.clone() for name, tensor in tensors.items()}, part)
    os.replace(part, folder / ADAPTER_FILE)
    part = folder / f"{ADAPTER_CONFIG}.part"
    part.write_text(json.dumps(_adapter_config(base_path, lora), indent=2) + "\n", encoding="utf-8")
    os.replace(part, folder / ADAPTER_CONFIG)


def load_adapter(model: Decoder, folder: str | Path) -> None:
    """Copy an adapter, and the norms it brings, into the model's parameters in place.

    Nothing is changed unless all of it fits.

    Raises:
        CheckpointError: files are missing or broken, the adapter is not plain LoRA, or its targets, rank, scale or
            shapes are not those of the model.
    """
    folder = Path(folder)
    config = _read_config(folder)
    file = TensorFile(folder / ADAPTER_FILE)
    wanted = _lora_tensors(model)
    norms = _norm_tensors(model)
    if file.names & norms.keys():
        wanted |= norms
    _check_scale(model, config, folder)
    for name in sorted(wanted.keys() ^ file.names):
        problem = "is missing from" if name in wanted else "has no place in the model, but is in"
        raise CheckpointError(
            f"adapter tensor {name} {problem} {file.path}",
            expected="an adapter with the targets and layers of the loaded model",
            remedy="Load the model with the lora.rank, lora.targets and lora.train_norms of the adapter.",
        )
    for name, parameter in wanted.items():
        if file.shape(name) != tuple(parameter.shape):
            raise CheckpointError(
                f"{file.path}: adapter tensor {name} does not fit the model",
                got=f"shape {list(file.shape(name))}",
                expected=f"shape {list(parameter.shape)}",
            )
    values = {name: file.read(name) for name in wanted}
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(values[name])


def adapter_lora_config(folder: str | Path) -> LoraConfig:
    """The LoRA settings that a saved adapter needs its model to be loaded with.

    Raises:
        CheckpointError: the adapter's config is missing, broken, or not plain LoRA on known projections.
    """
    folder = Path(folder)
    config = _read_config(folder)
    targets = config.get("target_modules")
    if not isinstance(targets, list) or not targets or not set(targets) <= set(PROJECTIONS):
        raise CheckpointError(
            f"{folder / ADAPTER_CONFIG}: target_modules is unusable",
            got=targets,
            expected=f"a list of names among {', '.join(PROJECTIONS)}",
        )
    return LoraConfig(
        rank=config["r"],
        alpha=float(config["lora_alpha"]),
        targets=tuple(name for name in PROJECTIONS if name in targets),
        train_norms=bool(config.get("modules_to_save")),
    )


def _lora_tensors(model: Decoder) -> dict[str, Tensor]:
    """PEFT name -> A or B of the model, as views of its parameters."""
    tensors: dict[str, Tensor] = {}
    for linear in model.grouped_linears():
        if linear.lora is None:
            continue
        for name, (a_RI, b_OR) in linear.lora.matrices().items():
            tensors[f"{PREFIX}.{name}.lora_A.weight"] = a_RI
            tensors[f"{PREFIX}.{name}.lora_B.weight"] = b_OR
    return tensors


def _norm_tensors(model: Decoder) -> dict[str, Tensor]:
    """PEFT name -> scale of every layer norm."""
    return {
        f"{PREFIX}.layers.{layer}.{NORM_NAMES[site]}.weight": model.norm_weight(layer, site)
        for layer in range(model.spec.num_layers)
        for site in LAYER_NORMS
    }


def _adapter_config(base_path: str, lora: LoraConfig) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_path,
        "r": lora.rank,
        # PEFT and vLLM read an integer here.
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.targets),
        "modules_to_save": list(NORM_NAMES.values()) if lora.train_norms else None,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _read_config(folder: Path) -> dict[str, Any]:
    config = read_json_object(folder, ADAPTER_CONFIG)
    for key, plain in PLAIN_SETTINGS.items():
        if key in config and config[key] not in plain:
            raise CheckpointError(
                f"{folder / ADAPTER_CONFIG}: this kind of adapter is not supported",
                got=f"{key}={config[key]}",
                expected=f"{key}={plain[0]}",
            )
    if not isinstance(config.get("r"), int) or not isinstance(config.get("lora_alpha"), int | float):
        raise CheckpointError(f"{folder / ADAPTER_CONFIG} is unusable", expected="r and lora_alpha")
    return config


def _check_scale(model: Decoder, config: Mapping[str, Any], folder: Path) -> None:
    for linear in model.grouped_linears():
        if linear.lora is not None and (
            linear.lora.rank != config["r"] or linear.lora.scale != config["lora_alpha"] / config["r"]
        ):
            raise CheckpointError(
                f"the adapter in {folder} has another rank or scale than the model",
                got=f"r={config['r']}, lora_alpha={config['lora_alpha']}",
                expected=f"r={linear.lora.rank}, lora_alpha={linear.lora.scale * linear.lora.rank:g}",
                remedy="Load the model with the adapter's lora.rank and lora.alpha.",
            )

"""Channel scales of a layer, folded exactly into what stands before each projection, and taken out of an adapter again.

With s the scales of a projection's inputs, w' = w diag(s) computes from x / s what w computes from x. The division is folded into

    attn_norm   q, k, v read u * n          n' = n / s
    v           o reads softmax(.) v        rows (and bias) of v / s; query heads that share a key/value head share s
    mlp_norm    gate, up read u * n         n' = n / s
    up          down reads silu(g) * u      rows (and bias) of up / s

Norms and biases stay unquantized in the checkpoint's own type, where n / s would be rounded. So s is chosen such that it is not: n' is
rounded first, and s = n / n' is what the weights are multiplied by, before they are rounded for the only time, by the quantizer.

An adapter on the folded model adds B A to w' = diag(1/t) w diag(s), with t the scales by which its own rows were divided (v, up; else
1). On the plain model that is diag(t) B A diag(1/s): `unfold_adapter`. Trained norms go back by n = n' s.

Legend: D hidden size, K key/value heads, G query heads a key/value head, d head dimension, F inner size of the MLP.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from qerl.errors import CheckpointError
from qerl.formats.tensor_file import save_tensors
from qerl.metrics.files import whole_folder
from qerl.model.adapter_files import ADAPTER_CONFIG, ADAPTER_FILE, NORM_NAMES, PREFIX
from qerl.model.spec import ModelSpec, read_json_object
from qerl.model.tensor_folder import TensorFile
from qerl.quantize.layer_tensors import LayerTensors

FOLDS_FILE = "qerl_folds.st"
"""Channel scales beside a quantized checkpoint; safetensors, under a suffix that no server takes for weights."""
FOLDS = ("attn_norm", "v", "o", "mlp_norm", "up")
"""Names of a layer's scales: of the inputs of q, k, v; the rows of v; the inputs of o (those of v, spread over the heads that share
them); the inputs of gate and up; the rows of up, which are the inputs of down."""
_UNFOLDED_COLUMNS = {
    "q_proj": "attn_norm",
    "k_proj": "attn_norm",
    "v_proj": "attn_norm",
    "o_proj": "o",
    "gate_proj": "mlp_norm",
    "up_proj": "mlp_norm",
    "down_proj": "up",
}
_UNFOLDED_ROWS = {"v_proj": "v", "up_proj": "up"}


def spread_heads(scales_K: Tensor, spec: ModelSpec) -> Tensor:
    """[K d] for v to [H d] for o: each key/value head's entries once a query head that shares it."""
    heads = scales_K.view(spec.num_kv_heads, 1, spec.head_dim)
    return heads.expand(-1, spec.num_heads // spec.num_kv_heads, -1).reshape(-1)


def tie_heads(values_H: Tensor, spec: ModelSpec) -> Tensor:
    """[H d] of o to the mean over the query heads that share a key/value head, [K d]."""
    return values_H.view(spec.num_kv_heads, -1, spec.head_dim).mean(1).reshape(-1)


def fold_norm(layer: LayerTensors, norm: str, readers: str, scales_D: Tensor) -> Tensor:
    """Fold `scales_D` into a norm and the group that reads it, in place; returns the exact scales, float64 [D]."""
    plain = layer.norms[norm]
    folded = (plain.double() / scales_D.double()).to(plain.dtype)
    # A scale of 0, or one that the division would lose to underflow, is left as it is.
    folded = torch.where((folded == 0) | ~torch.isfinite(folded), plain, folded)
    exact_D = torch.where(plain == 0, 1.0, plain.double() / folded.double())
    exact_D = torch.where(torch.isfinite(exact_D), exact_D, 1.0)
    layer.norms[norm] = folded
    layer.weights[readers] = _scale_columns(layer.weights[readers], exact_D)
    return exact_D


def fold_rows(layer: LayerTensors, group: str, rows: slice, readers: str, scales: Tensor, spec: ModelSpec) -> Tensor:
    """Fold scales of the inputs of `readers` into `rows` of `group` (v of qkv, up of gate_up), in place.

    Returns:
        The exact scales, float64, one a row.
    """
    exact = scales.double()
    if group in layer.biases:
        bias = layer.biases[group].clone()
        plain = bias[rows]
        folded = (plain.double() / exact).to(plain.dtype)
        folded = torch.where((folded == 0) | ~torch.isfinite(folded), plain, folded)
        exact = torch.where(plain == 0, exact, plain.double() / folded.double())
        bias[rows] = folded
        layer.biases[group] = bias
    weight = _working_copy(layer.weights[group])
    weight[rows] = (weight[rows].double() / exact[:, None]).to(weight.dtype)
    layer.weights[group] = weight
    spread = spread_heads(exact, spec) if readers == "o" else exact
    layer.weights[readers] = _scale_columns(layer.weights[readers], spread)
    return exact


def _working_copy(weight: Tensor) -> Tensor:
    """float32, or float64 if it is that: folding must not round to a short type."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)


def _scale_columns(weight: Tensor, scales_I: Tensor) -> Tensor:
    work = _working_copy(weight)
    return work.mul_(scales_I.to(work.dtype))


def fold_name(layer: int, place: str) -> str:
    """Name of one of the `FOLDS` in `qerl_folds.st`."""
    return f"layers.{layer}.{place}"


def unfold_adapter(adapter: str | Path, checkpoint: str | Path, out: str | Path) -> None:
    """Rewrite an adapter that was trained on a folded checkpoint so that it fits the plain model.

    Args:
        adapter: folder in PEFT's format.
        checkpoint: the quantized folder that it was trained on, which holds the channel scales.
        out: folder to make.

    Raises:
        CheckpointError: files are missing, `out` exists, or the adapter has another shape or layers than the scales.
        OutputError: `out` cannot be written.
    """
    adapter, checkpoint, out = Path(adapter), Path(checkpoint), Path(out)
    if out.exists():
        raise CheckpointError("the output folder exists already", got=out, expected="a new folder")
    config = read_json_object(adapter, ADAPTER_CONFIG)
    if not (checkpoint / FOLDS_FILE).exists():
        raise CheckpointError(
            f"{checkpoint} holds no channel scales",
            expected=FOLDS_FILE,
            remedy="Only checkpoints quantized with awq or best are folded; adapters of others fit the plain model as they are.",
        )
    file, scales = TensorFile(adapter / ADAPTER_FILE), TensorFile(checkpoint / FOLDS_FILE)
    folds = {name: scales.read(name) for name in scales.names}
    tensors = unfold_tensors({name: file.read(name) for name in file.names}, folds)
    config["base_model_name_or_path"] = read_json_object(checkpoint, "qerl_quantization.json")["source"]["name"]
    with whole_folder(out) as part:
        save_tensors(tensors, part / ADAPTER_FILE)
        (part / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def unfold_tensors(tensors: Mapping[str, Tensor], folds: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a PEFT file with the channel scales `folds` (named by `fold_name`) taken out.

    Raises:
        CheckpointError: a tensor has no place in the folded model or does not fit its scales.
    """
    return {name: _unfold(name, tensor, folds) for name, tensor in tensors.items()}


def _unfold(name: str, tensor: Tensor, folds: Mapping[str, Tensor]) -> Tensor:
    columns, rows = _places(name)
    wanted = [(place, size) for place, size in ((rows, tensor.shape[0]), (columns, tensor.shape[-1])) if place]
    for place, size in wanted:
        found = folds.get(place)
        if found is None or found.numel() != size:
            raise CheckpointError(
                f"adapter tensor {name} does not fit the channel scales of the checkpoint",
                got=f"shape {list(tensor.shape)}",
                expected="no such layer" if found is None else f"{found.numel()} channels ({place})",
                remedy="Name the checkpoint that the adapter was trained on.",
            )
    work = tensor.double()
    if columns:
        work = work / folds[columns]
    if rows:
        work = work * (folds[rows][:, None] if work.ndim == 2 else folds[rows])
    return work.to(tensor.dtype)


def _places(name: str) -> tuple[str | None, str | None]:
    """(scales to divide the columns by, scales to multiply the rows by) of one tensor of a PEFT file."""
    parts = name.removeprefix(f"{PREFIX}.layers.").split(".")
    if len(parts) > 2 and parts[0].isdigit():
        layer = int(parts[0])
        norms = {norm: place for place, norm in NORM_NAMES.items()}
        if parts[1] in norms:
            return None, fold_name(layer, norms[parts[1]])
        projection, kind = parts[-3], parts[-2]
        if kind == "lora_A" and projection in _UNFOLDED_COLUMNS:
            return fold_name(layer, _UNFOLDED_COLUMNS[projection]), None
        if kind == "lora_B" and projection in _UNFOLDED_COLUMNS:
            return None, fold_name(layer, _UNFOLDED_ROWS[projection]) if projection in _UNFOLDED_ROWS else None
    raise CheckpointError(f"adapter tensor {name} is not one of a plain LoRA adapter on this architecture")

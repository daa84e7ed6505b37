"""A whole model on disk, as an ordinary Hugging Face folder: what training in full mode saves, and reads back when it resumes.

``transformers`` and servers load a folder written here as they load the one that training began with. Linear layers, biases,
embedding and head are stored in the compute type, norm scales in float32, so reading gives back every bit.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from torch import Tensor

from qerl.errors import CheckpointError
from qerl.formats.tensor_file import save_tensors
from qerl.model.decoder import Decoder
from qerl.model.spec import read_json_object
from qerl.model.tensor_folder import INDEX_FILE, SINGLE_FILE, TensorFolder

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"
LAYER_SCALES = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}
"""Norm of a decoder layer -> its name in a checkpoint."""
SHARD_BYTES = 5_000_000_000

COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Tokenizer, chat template and generation settings."""
_NOT_COPIED = ("config.json", INDEX_FILE, "trainer_state.json", "adapter_config.json")


def model_tensors(model: Decoder) -> dict[str, Tensor]:
    """Checkpoint name -> tensor of a model of unquantized weights, as views of what it holds."""
    tensors: dict[str, Tensor] = {EMBEDDING: model.embed_tokens}
    if model.lm_head is not None:
        tensors[HEAD] = model.lm_head
    for layer, linears in _layers(model):
        prefix = f"model.layers.{layer}"
        for site, name in LAYER_SCALES.items():
            scale = getattr(model.layers[layer], site)
            if scale is not None:
                tensors[f"{prefix}.{name}.weight"] = scale
        for shape, linear in linears:
            assert linear.weight.format == "bf16", "packed weights have layouts of their own (qerl.quantize)"
            names = shape.part_names(layer)
            weights = linear.weight.tensors["weight"].split(linear.sizes)
            tensors |= {f"model.{name}.weight": part for name, part in zip(names, weights, strict=True)}
            if linear.bias_O is not None:
                biases = linear.bias_O.split(linear.sizes)
                tensors |= {f"model.{name}.bias": part for name, part in zip(names, biases, strict=True)}
    tensors[FINAL_NORM] = model.final_norm
    return tensors


def save_model(model: Decoder, folder: str | Path, *, source: str | Path) -> None:
    """Write the model with its configuration and tokenizer.

    Args:
        model: unquantized, without adapters; its current weights are written.
        folder: made if missing. It holds ``model.safetensors``, or shards of at most 5 GB and their index.
        source: the folder the model was loaded from; its ``config.json`` (with ``dtype`` set to the compute type), tokenizer
            and generation settings are taken over.
    """
    folder, source = Path(folder), Path(source)
    folder.mkdir(parents=True, exist_ok=True)
    shards = list(_shards(model_tensors(model)))
    placed: dict[str, str] = {}
    total = 0
    for index, shard in enumerate(shards):
        name = SINGLE_FILE if len(shards) == 1 else f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        held = {key: tensor.detach().to("cpu", copy=True).contiguous() for key, tensor in shard.items()}
        save_tensors(held, folder / name)
        placed |= dict.fromkeys(held, name)
        total += sum(tensor.numel() * tensor.element_size() for tensor in held.values())
    if len(shards) > 1:
        _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": placed})
    dtype = str(model.dtype).removeprefix("torch.")
    config = {key: value for key, value in read_json_object(source, "config.json").items() if key != "torch_dtype"}
    _write_json(folder / "config.json", config | {"dtype": dtype})
    copy_settings(source, folder)


def copy_settings(source: Path, folder: Path, *, without: Collection[str] = ()) -> None:
    """Copy what a model folder holds beside weights and ``config.json``: tokenizer, chat template, generation settings.

    Args:
        without: names of files that the caller writes itself.
    """
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in COPIED_SUFFIXES and path.name not in (*_NOT_COPIED, *without):
            shutil.copyfile(path, folder / path.name)


def load_weights(model: Decoder, folder: str | Path) -> None:
    """Copy the weights of a folder that ``save_model`` wrote into the model's tensors in place.

    Nothing is changed unless all of it fits.

    Raises:
        CheckpointError: files are missing or broken, or their tensors are not those of the model.
        FormatError: a tensor holds NaN or infinity.
    """
    wanted = model_tensors(model)
    source = TensorFolder(Path(folder))
    source.check({name: tuple(tensor.shape) for name, tensor in wanted.items()}, frozenset())
    with torch.no_grad():
        for name, tensor in wanted.items():
            stored = source.read(name)
            if stored.dtype != tensor.dtype:
                raise CheckpointError(
                    f"tensor {name} of {folder} is of another type than the model's",
                    got=str(stored.dtype).removeprefix("torch."),
                    expected=str(tensor.dtype).removeprefix("torch."),
                    remedy="Resume with the model.dtype that the checkpoint was written with.",
                )
            tensor.copy_(stored)


def _layers(model: Decoder) -> Iterator[tuple[int, list[tuple]]]:
    """(layer, its groups of linear layers with their shapes)."""
    shapes = model.spec.groups()
    for index, layer in enumerate(model.layers):
        yield index, [(shape, getattr(layer, shape.attribute)) for shape in shapes]


def _shards(tensors: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The tensors in order, cut where a file would exceed ``SHARD_BYTES``."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        if shard and size + nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += nbytes
    yield shard


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

"""Portable checkpoints: small enough to carry to another machine, and not bit-exact.

An ordinary checkpoint holds float32 masters and two float32 moments, 12 bytes a trained parameter (218 MB at rank 32 on a
0.5B model with all seven targets). A portable one holds, in one deflated file:

* the LoRA matrices in bfloat16, exponents and the other bits in two planes, because only exponents compress;
* the first moment in 8 bits: round(127 m / s), s the largest |m| of a block of 256;
* the root of the second moment in 8 bits: 12 levels an octave below the largest of a block of 256, so that the size of
  an AdamW step is kept within 3 % over 21 octaves;
* norm scales, step counters and all else exactly.

What it gives up: the masters' bits below bfloat16 (the bfloat16 copies that a bfloat16 model computes with are the same,
to the bit), and the moments' bits below 8. A run that goes on from one says so: ``trainer_state.json``, ``summary.json``
and the metric ``resumes/portable``.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from qerl.errors import CheckpointError
from qerl.formats.tensor_file import save_tensors
from qerl.metrics.files import whole_folder
from qerl.metrics.run_dir import RunDir
from qerl.model.adapter_files import ADAPTER_CONFIG, ADAPTER_FILE
from qerl.train.noise.director import SUM_FILE

PORTABLE_FILE = "portable.npz"
PORTABLE_VERSION = 1
OPTIMIZER_FILE = "optimizer.pt"
STATE_FILE = "trainer_state.json"
LEFT_BEHIND = "(text left behind by a portable copy)"
BLOCK = 256
"""Moments that share a scale."""
LEVELS_PER_OCTAVE = 12
RUN_FILES = (
    "config.resolved.yaml",
    "env.json",
    "metrics.jsonl",
    "probe.json",
    "memory.json",
    "summary.json",
    "final.json",
    "cell.json",
)
"""Small files of a run folder that travel as they are."""

Arrays = dict[str, NDArray[Any]]


def write_portable_run(run: RunDir, target: Path, *, checkpoint: bool = True) -> int:
    """Write a run folder that can go on, or be reported, elsewhere: without records, adapters, answers' texts.

    Args:
        run: a run folder; it is only read.
        target: the folder to write, in place of an older one.
        checkpoint: take the newest checkpoint along, in portable form.

    Returns:
        Bytes written.

    Raises:
        CheckpointError: the checkpoint cannot be read or is not one of adapters.
    """
    newest = run.latest_checkpoint() if checkpoint else None
    with whole_folder(target) as folder:
        copy = RunDir(folder)
        for name in RUN_FILES:
            if (run.path / name).exists():
                shutil.copyfile(run.path / name, folder / name)
        if run.evaluations_dir.is_dir():
            for path in sorted(run.evaluations_dir.glob("*.jsonl")):
                copy.write_text(copy.evaluations_dir / path.name, _without_texts(path.read_text(encoding="utf-8")))
        if newest is not None:
            write_portable(newest, copy.checkpoints_dir / newest.name)
    return sum(path.stat().st_size for path in target.rglob("*") if path.is_file())


def write_portable(checkpoint: Path, target: Path) -> int:
    """Write the portable form of one checkpoint; a checkpoint that is portable already is copied.

    Returns:
        Bytes written.

    Raises:
        CheckpointError: the checkpoint cannot be read or holds no adapter.
    """
    with whole_folder(target) as folder:
        for name in (ADAPTER_CONFIG, STATE_FILE, SUM_FILE):
            if (checkpoint / name).exists():
                shutil.copyfile(checkpoint / name, folder / name)
        if is_portable(checkpoint):
            shutil.copyfile(checkpoint / PORTABLE_FILE, folder / PORTABLE_FILE)
        else:
            arrays = _pack(*_read(checkpoint))
            _save_deflated(folder / PORTABLE_FILE, arrays)
    return sum(path.stat().st_size for path in target.iterdir())


def _save_deflated(path: Path, arrays: Arrays) -> None:
    """``np.savez_compressed`` at the lowest level: such bytes become no smaller than 2 or 3 % for three times the seconds."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for name, array in arrays.items():
            with file.open(f"{name}.npy", "w", force_zip64=True) as part:
                np.lib.format.write_array(part, array, allow_pickle=False)


def is_portable(checkpoint: Path) -> bool:
    """Whether a checkpoint folder holds the portable form alone."""
    return (checkpoint / PORTABLE_FILE).exists() and not (checkpoint / OPTIMIZER_FILE).exists()


def expand_portable(checkpoint: Path) -> None:
    """Turn a portable checkpoint into an ordinary one in place, and mark its state as not bit-exact.

    Raises:
        CheckpointError: the file is damaged or of another version.
    """
    try:
        with np.load(checkpoint / PORTABLE_FILE, allow_pickle=False) as stored:
            adapter, optimizer = _unpack({name: stored[name] for name in stored.files})
        state = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
        state["portable"] = [*state.get("portable", []), int(state["step"])]
    except Exception as error:  # noqa: BLE001 (a damaged archive can end in nearly any exception)
        raise CheckpointError(
            "the portable checkpoint cannot be read",
            got=f"{checkpoint}: {str(error).strip() or type(error).__name__}",
            remedy="Copy it again, or resume from another one",
        ) from None
    with whole_folder(checkpoint) as folder:
        for name in (ADAPTER_CONFIG, SUM_FILE):
            if (checkpoint / name).exists():
                shutil.copyfile(checkpoint / name, folder / name)
        save_tensors(adapter, folder / ADAPTER_FILE)
        torch.save(optimizer, folder / OPTIMIZER_FILE)
        (folder / STATE_FILE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")


def linear8(values_N: Tensor) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Codes [N] in -127..127 and a scale a block: value = code * scale / 127. Error: half a step, scale / 254."""
    blocks_BK = _blocks(values_N)
    scales_B1 = blocks_BK.abs().amax(1, keepdim=True)
    codes_BK = (blocks_BK / scales_B1.clamp(min=torch.finfo(torch.float32).tiny) * 127).round()
    return codes_BK.to(torch.int8).flatten()[: values_N.numel()].numpy(), scales_B1.flatten().numpy()


def linear8_values(codes_N: NDArray[np.int8], scales_B: NDArray[np.float32]) -> Tensor:
    """What :func:`linear8` stored, float32 [N]."""
    values_BK = _blocks(torch.from_numpy(codes_N.astype(np.float32))) * torch.from_numpy(scales_B)[:, None] / 127
    return values_BK.flatten()[: len(codes_N)]


def log8(values_N: Tensor) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Codes [N] and a scale a block of values that are not negative: value = scale * 2^((code - 255) / 12).

    Code 0 is exactly 0. Relative error at most 2^(1/24) - 1 = 2.9 %; what is smaller than 2^-21 of its block's largest
    becomes that.
    """
    blocks_BK = _blocks(values_N)
    scales_B1 = blocks_BK.amax(1, keepdim=True)
    ratios_BK = blocks_BK / scales_B1.clamp(min=torch.finfo(torch.float32).tiny)
    below_BK = (-LEVELS_PER_OCTAVE * torch.log2(ratios_BK.clamp(min=1e-30))).round().clamp(max=254)
    codes_BK = torch.where(ratios_BK > 0, 255 - below_BK, torch.zeros_like(below_BK))
    return codes_BK.to(torch.uint8).flatten()[: values_N.numel()].numpy(), scales_B1.flatten().numpy()


def log8_values(codes_N: NDArray[np.uint8], scales_B: NDArray[np.float32]) -> Tensor:
    """What :func:`log8` stored, float32 [N]."""
    codes_BK = _blocks(torch.from_numpy(codes_N.astype(np.float32)))
    values_BK = torch.from_numpy(scales_B)[:, None] * torch.exp2((codes_BK - 255) / LEVELS_PER_OCTAVE)
    return torch.where(codes_BK > 0, values_BK, 0.0).flatten()[: len(codes_N)]


def _blocks(values_N: Tensor) -> Tensor:
    flat_N = values_N.detach().float().flatten()
    return torch.nn.functional.pad(flat_N, (0, -flat_N.numel() % BLOCK)).view(-1, BLOCK)


def _read(checkpoint: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        adapter = load_file(checkpoint / ADAPTER_FILE)
        optimizer = torch.load(checkpoint / OPTIMIZER_FILE, map_location="cpu", weights_only=True)
        if any(isinstance(value, dict) for entry in optimizer["state"].values() for value in entry.values()):
            raise CheckpointError(
                "8-bit moments have no portable form",
                got=str(checkpoint / OPTIMIZER_FILE),
                remedy="Carry the ordinary checkpoint: its moments are small already",
            )
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001 (a damaged pickle can end in nearly any exception)
        raise CheckpointError(
            "a portable checkpoint is made of an adapter and its optimizer, which cannot be read",
            got=f"{checkpoint}: {str(error).strip() or type(error).__name__}",
        ) from None
    return adapter, optimizer


def _pack(adapter: Mapping[str, Tensor], optimizer: Mapping[str, Any]) -> Arrays:
    """Arrays of the file. Everything stored by one codec is joined; the header says what lies where, in order."""
    parts: dict[str, list[Tensor]] = {"bf16": [], "linear8": [], "log8": [], "raw": []}
    header: dict[str, Any] = {
        "version": PORTABLE_VERSION,
        "adapter": [
            [name, *_store(parts, tensor, "bf16" if tensor.dim() > 1 else "raw")] for name, tensor in adapter.items()
        ],
        "groups": optimizer["param_groups"],
        "state": [],
    }
    for index, entry in optimizer["state"].items():
        for key, value in entry.items():
            if not torch.is_tensor(value):
                header["state"].append([index, key, "value", value, None])
                continue
            large = value.dtype == torch.float32 and value.dim() > 1
            codec = {"exp_avg": "linear8", "exp_avg_sq": "log8"}.get(key, "raw") if large else "raw"
            header["state"].append([index, key, *_store(parts, value.sqrt() if codec == "log8" else value, codec)])
    bits_N = _joined(parts["bf16"], torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    arrays: Arrays = {
        "header": np.frombuffer(json.dumps(header).encode(), np.uint8),
        "bf16_exponents": ((bits_N >> 7) & 255).astype(np.uint8),
        "bf16_rest": ((bits_N & 127) | ((bits_N >> 8) & 128)).astype(np.uint8),
        "raw": _joined(parts["raw"], torch.uint8).numpy(),
    }
    arrays["linear8_codes"], arrays["linear8_scales"] = linear8(_joined(parts["linear8"], torch.float32))
    arrays["log8_codes"], arrays["log8_scales"] = log8(_joined(parts["log8"], torch.float32))
    return arrays


def _store(parts: dict[str, list[Tensor]], tensor: Tensor, codec: str) -> list[Any]:
    """Queue a tensor for a codec; returns [codec, dtype, shape]."""
    flat = tensor.detach().cpu().contiguous().flatten()
    parts[codec].append(flat.view(torch.uint8) if codec == "raw" else flat.bfloat16() if codec == "bf16" else flat)
    return [codec, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def _joined(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=dtype)


def _unpack(arrays: Arrays) -> tuple[dict[str, Tensor], dict[str, Any]]:
    header = json.loads(arrays["header"].tobytes().decode())
    if header["version"] != PORTABLE_VERSION:
        raise ValueError(f"version {header['version']}, expected {PORTABLE_VERSION}")
    exponents, rest = arrays["bf16_exponents"].astype(np.uint16), arrays["bf16_rest"].astype(np.uint16)
    bits_N = ((rest & 128) << 8) | (exponents << 7) | (rest & 127)
    streams = {
        "bf16": torch.from_numpy(bits_N.view(np.int16)).view(torch.bfloat16).float(),
        "linear8": linear8_values(arrays["linear8_codes"], arrays["linear8_scales"]),
        "log8": log8_values(arrays["log8_codes"], arrays["log8_scales"]).square(),
        "raw": torch.from_numpy(arrays["raw"].copy()),
    }
    places = dict.fromkeys(streams, 0)

    def take(codec: str, dtype: str, shape: list[int]) -> Tensor:
        kind: torch.dtype = getattr(torch, dtype)
        length = int(np.prod(shape, dtype=np.int64)) * (kind.itemsize if codec == "raw" else 1)
        part = streams[codec][places[codec] : places[codec] + length]
        places[codec] += length
        # A copy of its own, so that a slice that does not begin on the type's boundary can be viewed as it.
        return (part.clone().view(kind) if codec == "raw" else part.to(kind).clone()).view(shape)

    adapter = {name: take(codec, dtype, shape) for name, codec, dtype, shape in header["adapter"]}
    state: dict[int, dict[str, Any]] = {}
    for index, key, codec, dtype, shape in header["state"]:
        state.setdefault(index, {})[key] = dtype if codec == "value" else take(codec, dtype, shape)
    return adapter, {"state": state, "param_groups": [_group(group) for group in header["groups"]]}


def _group(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group as it was before JSON: betas are a tuple."""
    return {key: tuple(value) if key == "betas" else value for key, value in group.items()}


def _without_texts(lines: str) -> str:
    """Rows of an evaluation without questions and answers' texts; what was found, its outcome and its length stay."""
    rows = [json.loads(line) for line in lines.split("\n") if line]
    for row in rows:
        row["question"] = LEFT_BEHIND
        row["answers"] = [answer | {"text": LEFT_BEHIND} for answer in row["answers"]]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

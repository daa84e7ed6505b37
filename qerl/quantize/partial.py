"""The folder that a run writes to until it is whole: `OUT.partial`, one file a layer, and a manifest of what is done.

A file of a layer counts only once the manifest names it, and both appear whole or not at all, so a run that was killed goes on
after its last whole layer. At the end the files are joined into shards (bytes are moved, nothing is read into memory) and the folder
is renamed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from qerl.errors import CheckpointError
from qerl.formats.tensor_file import save_tensors
from qerl.metrics.run_lock import LOCK_NAME, RunLock
from qerl.model.spec import read_json_object
from qerl.model.tensor_folder import INDEX_FILE, SINGLE_FILE, TensorFile
from qerl.quantize.tensor_bytes import StoredTensor, read_header, write_tensors

MANIFEST = "progress.json"
ACTIVATIONS = "activations"
_LAYER_FILE = "layer-{:05d}.safetensors"
_FOLD_FILE = "folds-{:05d}.safetensors"
_OURS = ("layer-", "folds-", "model", MANIFEST, ACTIVATIONS, LOCK_NAME)


class PartialFolder:
    """What exists of an output folder so far.

    Attributes:
        path: `OUT.partial`.
        records: what was said of each layer that is done, in order.

    Args:
        out: the final folder.
        settings: everything that the bytes depend on; an interrupted run is only taken up under equal settings.

    Raises:
        CheckpointError: `out` exists, or an interrupted run had other settings, or a folder of that name is something else.
    """

    def __init__(self, out: Path, settings: Mapping[str, Any]):
        if out.exists():
            raise CheckpointError(
                "the output folder exists already",
                got=out,
                expected="a new folder",
                remedy="Remove it or choose another name.",
            )
        self.out = out
        self.path = partial_path(out)
        self.settings = json.loads(json.dumps(settings))
        self.records: list[dict[str, Any]] = []
        if self.path.exists():
            self._take_up()
        self.path.mkdir(parents=True, exist_ok=True)
        self._write_manifest()

    def _take_up(self) -> None:
        if not (self.path / MANIFEST).exists():
            foreign = [entry.name for entry in self.path.iterdir() if not entry.name.startswith(_OURS)]
            if foreign:
                raise CheckpointError(
                    f"{self.path} is in the way and was not written by an interrupted run",
                    got=", ".join(sorted(foreign)[:3]),
                    remedy="Move it away.",
                )
            for entry in self.path.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry)
                elif entry.name != LOCK_NAME:
                    entry.unlink()
            return
        manifest = read_json_object(self.path, MANIFEST)
        before = manifest["settings"]
        for key in sorted(before.keys() | self.settings.keys()):
            if before.get(key) != self.settings.get(key):
                raise CheckpointError(
                    f"{self.path} holds an interrupted run with another {key}",
                    got=self.settings.get(key),
                    expected=f"{before.get(key)}",
                    remedy="Repeat the command with the settings it had, or remove that folder to begin anew.",
                )
        self.records = manifest["layers"]

    def _write_manifest(self) -> None:
        content = {"schema": 1, "settings": self.settings, "layers": self.records}
        part = self.path / (MANIFEST + ".part")
        part.write_text(json.dumps(content) + "\n", encoding="utf-8")
        os.replace(part, self.path / MANIFEST)

    def commit(
        self,
        tensors: Mapping[str, Tensor],
        copied: Mapping[str, StoredTensor],
        folds: Mapping[str, Tensor],
        record: Mapping[str, Any],
    ) -> None:
        """Keep the next layer.

        Args:
            tensors: new tensors, by their names in the checkpoint.
            copied: tensors to take over from the source, bytes untouched.
            folds: channel scales.
            record: JSON values about the layer.
        """
        index = len(self.records)
        new = self.path / f"{_LAYER_FILE.format(index)}.new"
        _save(tensors, new)
        write_tensors(self.layer_file(index), read_header(new) | dict(copied))
        new.unlink()
        if folds:
            _save(folds, self.fold_file(index))
        self.records.append(dict(record))
        self._write_manifest()

    def layer_file(self, index: int) -> Path:
        """Tensors of one layer."""
        return self.path / _LAYER_FILE.format(index)

    def fold_file(self, index: int) -> Path:
        """Channel scales of one layer; there may be none."""
        return self.path / _FOLD_FILE.format(index)

    def activations_folder(self) -> Path:
        """An empty folder for hidden states, which an interrupted run does not keep."""
        folder = self.path / ACTIVATIONS
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def join_folds(self, file: str) -> None:
        """Put the channel scales of all layers into one file, if there are any."""
        folds: dict[str, StoredTensor] = {}
        for index in range(len(self.records)):
            if self.fold_file(index).exists():
                folds |= read_header(self.fold_file(index))
        if folds:
            write_tensors(self.path / file, folds)

    def join_shards(self, others: Mapping[str, StoredTensor], shard_bytes: int) -> None:
        """Write the checkpoint's own files: `model.safetensors`, or shards of about `shard_bytes` with their index.

        A layer is never cut; tensors outside the layers are taken from `others`. A shard that is whole is not written again, so
        this can be interrupted too.
        """
        layers = [read_header(self.layer_file(index)) for index in range(len(self.records))]
        units = [*layers, *({name: tensor} for name, tensor in others.items())]
        shards = _shards(units, shard_bytes)
        count, weight_map, total = len(shards), {}, 0
        for number, shard in enumerate(shards, start=1):
            file = SINGLE_FILE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            if not (self.path / file).exists():
                write_tensors(self.path / file, shard)
            weight_map.update(dict.fromkeys(shard, file))
            total += sum(tensor.nbytes for tensor in shard.values())
        if count > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (self.path / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def finish(self) -> None:
        """Remove what only an unfinished run needs, and give the folder its name."""
        shutil.rmtree(self.path / ACTIVATIONS, ignore_errors=True)
        for entry in self.path.iterdir():
            if entry.name.startswith(("layer-", "folds-", MANIFEST, LOCK_NAME)):
                entry.unlink()
        self.path.rename(self.out)

    def discard(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.path, ignore_errors=True)


def lock_partial(out: Path) -> RunLock:
    """The lock of the partial folder of `out`: two quantizations of one name would write one another's files."""
    return RunLock(partial_path(out), "quantized folder", "Wait until it ends or stop it, or choose another --out")


def partial_path(out: Path) -> Path:
    """`OUT.partial`; of a name that ends in no name of its own, such as `.`, by the folder that it means."""
    out = out if out.name else out.resolve()
    return out.parent / f"{out.name}.partial"


def read_tensors(file: Path) -> dict[str, Tensor]:
    """All tensors of one file of a partial folder, as copies."""
    opened = TensorFile(file)
    return {name: opened.read(name).clone() for name in sorted(opened.names)}


def _save(tensors: Mapping[str, Tensor], file: Path) -> None:
    part = file.with_name(file.name + ".part")
    save_tensors({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, part)
    os.replace(part, file)


def _shards(units: list[dict[str, StoredTensor]], shard_bytes: int) -> list[dict[str, StoredTensor]]:
    """Neighboring units together, up to `shard_bytes` a shard."""
    shards: list[dict[str, StoredTensor]] = []
    filled = 0
    for unit in units:
        size = sum(tensor.nbytes for tensor in unit.values())
        if not shards or filled + size > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1] |= unit
        filled += size
    return shards

"""Files and folders that are there and that this user may not open: one message that names them, exit code 2."""

import errno
import io
import os
import shutil
from pathlib import Path

import pytest
from cli_calls import SMALL, refused

from qerl.errors import CheckpointError
from qerl.metrics.files import system_refusal
from qerl.model import tensor_folder
from qerl.model.locate import resolve_model_path


@pytest.fixture
def close(monkeypatch):
    """Closes a path, and what is below it, to this process; permissions would not stop an administrator."""

    def closed(path: Path) -> Path:
        def guarded(call):
            def guard(given, *arguments, **named):
                if not isinstance(given, int) and path in (Path(os.fsdecode(given)), *Path(os.fsdecode(given)).parents):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(given))
                return call(given, *arguments, **named)

            return guard

        folder = path.is_dir()
        monkeypatch.setattr(io, "open", guarded(io.open))
        if folder:
            monkeypatch.setattr(os, "stat", guarded(os.stat))
            monkeypatch.setattr(os, "access", lambda given, mode: path != Path(given))
            monkeypatch.setattr(os, "listdir", guarded(os.listdir))
        return path

    return closed


@pytest.mark.parametrize("verb", ["train", "plan", "matrix"])
def test_a_configuration_that_may_not_be_read(verb, tmp_path, close):
    path = tmp_path / "run.yaml"
    path.write_text("name: a\n")
    assert f"{path} cannot be opened; got Permission denied; expected a path that this user may" in refused(
        verb, close(path)
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "{}/run.yaml"),
        ("plan", "model.path={}/model"),
        ("eval", "{}/run"),
        ("rollout", "{}/run", "--out", "new"),
        ("rollout", "demo", *SMALL[1:], "--data", "{}/rows.jsonl", "--out", "new"),
        ("report", "{}/run"),
        ("export", "{}/run", "--out", "new"),
        ("rescore", "{}/run"),
        ("quantize", "{}/model", "--out", "new"),
        ("results", "{}/matrix"),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_a_folder_that_may_not_be_looked_into(arguments, tmp_path, monkeypatch, close):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "closed"
    folder.mkdir()
    close(folder)
    text = refused(*(argument.format(folder) for argument in arguments))
    assert str(folder) in text and "cannot be opened; got Permission denied" in text
    assert os.listdir(tmp_path) == ["closed"]


def test_a_device_that_fails_while_it_is_read():
    error = system_refusal(OSError(errno.EIO, os.strerror(errno.EIO)))
    assert str(error).startswith("a file cannot be opened; got Input/output error")
    assert system_refusal(FileNotFoundError(errno.ENOENT, "gone", "x")) is None
    assert system_refusal(ValueError("x")) is None


def test_a_closed_folder_beside_a_missing_run_is_passed_over(tmp_path, close):
    (tmp_path / "closed").mkdir()
    close(tmp_path / "closed")
    assert "there is no such run folder" in refused("report", tmp_path / "none")


def test_files_of_a_model_that_may_not_be_read(tmp_path, monkeypatch, close):
    folder = tmp_path / "model"
    shutil.copytree(resolve_model_path("demo"), folder)

    def not_found(*given, **named):  # what safetensors says of a file that it may not open
        raise FileNotFoundError("No such file or directory")

    monkeypatch.setattr(tensor_folder, "safe_open", not_found)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be opened by this user"):
        tensor_folder.TensorFile(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="none does not exist"):
        tensor_folder.TensorFile(folder / "none")
    close(folder / "config.json")
    assert "config.json cannot be opened; got Permission denied" in refused("quantize", folder, "--out", tmp_path / "q")

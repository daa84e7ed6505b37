"""Interrupted runs: taken up to the same bytes, never mixed with other settings, never visible under the final name."""

import errno
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny

from qerl.errors import CheckpointError
from qerl.model.checkpoint import resolve_model_path
from qerl.quantize import TextRequest, partial, quantize_checkpoint, tensor_bytes

DEMO = resolve_model_path("demo")
SETTINGS = {
    "method": "best",
    "calibration": TextRequest(name="arithmetic", count=8, length=48),
    "report": TextRequest(name="arithmetic", count=6, length=48),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Files of a run without a break."""
    out = tmp_path_factory.mktemp("whole") / "out"
    quantize_checkpoint(DEMO, out, **SETTINGS)
    return files(out)


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stop_after(groups):
    def progress(done, total, name):
        if done == groups:
            raise KeyboardInterrupt

    return progress


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """What a run leaves that ended in the second layer."""
    out = tmp_path_factory.mktemp("killed") / "out"
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(DEMO, out, progress=stop_after(5), **SETTINGS)
    return out.with_name("out.partial")


@pytest.mark.parametrize("groups", [1, 5, 8])
def test_a_run_that_was_killed_goes_on_to_the_same_bytes(whole, tmp_path, groups):
    """In the first layer; in the second; after the last group and before its layer was kept."""
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(DEMO, out, progress=stop_after(groups), **SETTINGS)
    assert not out.exists()
    calls = []
    quantize_checkpoint(DEMO, out, progress=lambda *call: calls.append(call[:2]), **SETTINGS)
    assert calls[-1] == (8, 8)
    assert len(calls) == (8 if groups == 1 else 5), "a layer that was kept is not quantized again"
    assert files(out) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_run_that_was_killed_while_joining_goes_on(whole, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(partial.PartialFolder, "finish", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            quantize_checkpoint(DEMO, out, **SETTINGS)
    assert (tmp_path / "out.partial" / "model.safetensors").exists()
    quantize_checkpoint(DEMO, out, **SETTINGS)
    assert files(out) == whole


def test_a_half_written_layer_does_not_count(whole, killed, tmp_path):
    out, left = tmp_path / "out", shutil.copytree(killed, tmp_path / "out.partial")
    (left / "layer-00001.safetensors").write_bytes(b"half")
    (left / "layer-00001.safetensors.new.part").write_bytes(b"half")
    quantize_checkpoint(DEMO, out, **SETTINGS)
    assert files(out) == whole


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"method": "awq"}, "method"),
        ({"rounding": "torchao"}, "rounding"),
        ({"calibration": TextRequest(name="arithmetic", count=9, length=48)}, "calibration"),
        ({"report": None}, "report"),
        ({"dtype": torch.bfloat16}, "dtype"),
        ({"shard_bytes": 1000}, "shard_bytes"),
    ],
)
def test_other_settings_do_not_go_on_from_it(killed, tmp_path, change, named):
    out, before = tmp_path / "out", files(shutil.copytree(killed, tmp_path / "out.partial"))
    with pytest.raises(CheckpointError, match=f"interrupted run with another {named}.*remove that folder"):
        quantize_checkpoint(DEMO, out, **{**SETTINGS, **change})
    assert files(tmp_path / "out.partial") == before, "the interrupted run is left as it is"


def test_another_source_does_not_go_on_from_it(tmp_path):
    shutil.copytree(DEMO, tmp_path / "model")
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(tmp_path / "model", out, progress=stop_after(5))
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt", "again": "yes"})
    with pytest.raises(CheckpointError, match="interrupted run with another source"):
        quantize_checkpoint(tmp_path / "model", out)


def test_a_foreign_folder_in_the_way_is_not_touched(tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"out\.partial is in the way.*thesis\.txt"):
        quantize_checkpoint(DEMO, tmp_path / "out")
    assert (tmp_path / "out.partial" / "thesis.txt").read_text() == "mine"


def test_a_leftover_from_before_the_first_layer_is_replaced(tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "layer-00000.safetensors.new.part").write_bytes(b"half")
    quantize_checkpoint(DEMO, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("full_at", [1, 2, 3], ids=["first layer", "second layer", "shard"])
def test_a_full_disk_is_said_and_leaves_nothing_under_the_final_name(whole, tmp_path, monkeypatch, full_at):
    out, written = tmp_path / "out", []

    def copy(source, target, nbytes, original=tensor_bytes._copy):
        if target.name not in written:
            written.append(target.name)
        if len(written) == full_at:
            target.write(b"what still fits")
            raise OSError(errno.ENOSPC, "No space left on device")
        original(source, target, nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(tensor_bytes, "_copy", copy)
        with pytest.raises(CheckpointError, match=rf"disk is full.*{full_at - 1} layers in .*goes on after the last"):
            quantize_checkpoint(DEMO, out, **SETTINGS)
    assert not out.exists()
    manifest = json.loads((tmp_path / "out.partial" / "progress.json").read_text())
    assert len(manifest["layers"]) == full_at - 1
    quantize_checkpoint(DEMO, out, **SETTINGS)
    assert files(out) == whole


def test_a_full_disk_under_the_tensor_library_is_said_too(tmp_path, monkeypatch):
    from safetensors import SafetensorError

    def refuse(*args, **kwargs):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(partial, "save_tensors", refuse)
    with pytest.raises(CheckpointError, match="disk is full"):
        quantize_checkpoint(DEMO, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_integer_weights_are_refused_by_name(tmp_path):
    write_tiny(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.gate_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.int8)}, path, metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.mlp\.gate_proj\.weight does not fit config\.json.*I8 \[112, 64\].*BF16"
    ):
        quantize_checkpoint(tmp_path / "model", tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


def test_another_shape_is_refused_by_name(tmp_path):
    write_tiny(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.2.self_attn.v_proj.weight"
    save_file({**tensors, name: tensors[name][:-1].clone()}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.2\.self_attn\.v_proj\.weight.*\[31, 64\].*\[32, 64\]"):
        quantize_checkpoint(tmp_path / "model", tmp_path / "out")


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "not read.*quant_method=gptq"),
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
            "names no config_groups",
        ),
    ],
)
def test_a_wrong_quantization_config_is_refused(tmp_path, quantization, message):
    write_tiny(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}))
    with pytest.raises(CheckpointError, match=message):
        quantize_checkpoint(tmp_path / "model", tmp_path / "out")


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.norm.weight", "model.layers.1.input_layernorm.weight"]
)
def test_infinity_is_refused_in_copied_tensors_too(tmp_path, name):
    from qerl.errors import FormatError

    write_tiny(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors[name].view(-1)[-1] = torch.inf
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(FormatError, match=f"{name}.*infinity"):
        quantize_checkpoint(tmp_path / "model", tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]

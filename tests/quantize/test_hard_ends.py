"""What goes wrong around a quantization: two at once, a signal, a system that refuses, a file that lies."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl.config.load import load_config
from qerl.errors import CheckpointError, FormatError, OutputError, RunFolderError
from qerl.formats import get_format
from qerl.formats.gptq import feedback_factor
from qerl.model.checkpoint import load_model, resolve_model_path
from qerl.model.spec import ModelSpec
from qerl.quantize import quantize_checkpoint
from qerl.quantize.layout import stored_group
from qerl.quantize.partial import PartialFolder, lock_partial

DEMO = resolve_model_path("demo")


def test_two_quantizations_of_one_name_do_not_mix(tmp_path):
    out = tmp_path / "q"
    with lock_partial(out):
        other = subprocess.run(
            [sys.executable, "-m", "qerl", "quantize", "demo", "--out", out], capture_output=True, text=True
        )
    assert other.returncode == 2
    assert "another process is writing this quantized folder" in other.stderr and "--out" in other.stderr
    assert list(tmp_path.iterdir()) == []
    quantize_checkpoint(DEMO, out)
    assert not (out / "run.lock").exists()
    with pytest.raises(CheckpointError, match="exists already"):
        quantize_checkpoint(DEMO, out)
    assert {path.name for path in tmp_path.iterdir()} == {"q"}


def test_the_lock_of_another_thread_of_work_is_kept_while_old_files_are_cleared(tmp_path):
    folder = tmp_path / "q.partial"
    folder.mkdir()
    (folder / "layer-00000.safetensors").write_bytes(b"half")
    with lock_partial(tmp_path / "q"):
        PartialFolder(tmp_path / "q", {})
        assert sorted(path.name for path in folder.iterdir()) == ["progress.json", "run.lock"]
        with pytest.raises(RunFolderError):
            lock_partial(tmp_path / "q").__enter__()


WAITS_AFTER_A_LAYER = """
import time
from qerl.__main__ import main
from qerl.quantize import partial
save = partial.save_tensors
def save_and_wait(*arguments, **settings):
    save(*arguments, **settings)
    print("saved", flush=True)
    time.sleep(60)
partial.save_tensors = save_and_wait
main()
"""


def test_sigterm_says_how_to_go_on(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS_AFTER_A_LAYER, "quantize", "demo", "--out", tmp_path / "q"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout.readline() == "saved\n"
    process.send_signal(signal.SIGTERM)
    told = process.communicate(timeout=60)[0]
    assert process.returncode == 143, told
    assert "terminated; the same command goes on after the last whole layer" in told
    assert "Traceback" not in told


@pytest.mark.parametrize("place", [None, "q.partial", "q.partial/layer-00000.safetensors"])
def test_a_system_that_refuses_is_an_error_for_the_user(tmp_path, monkeypatch, place):
    def refuse(*arguments, **settings):
        raise PermissionError(13, "Permission denied", place and str(tmp_path / place))

    monkeypatch.setattr("qerl.quantize.partial.save_tensors", refuse)
    with pytest.raises(OutputError, match=r"q\.partial cannot be written; got Permission denied"):
        quantize_checkpoint(DEMO, tmp_path / "q")


@pytest.fixture
def written(tmp_path) -> Path:
    quantize_checkpoint(DEMO, tmp_path / "q")
    return tmp_path / "q"


def change(folder: Path, edit) -> None:
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def quantized(folder: Path):
    return load_model(folder, quant=load_config(None, ["quant.format=nvfp4"]).quant, lora=None, dtype=torch.float32)


def test_a_block_scale_that_no_quantizer_writes_is_refused_by_name(written):
    name = "model.layers.0.self_attn.o_proj.weight_scale"

    def edit(tensors):
        tensors[name] = tensors[name].float()
        tensors[name][0, 0] = -1.0
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    change(written, edit)
    with pytest.raises(FormatError, match=r"a block scale of .*o_proj.* is unusable"):
        quantized(written)


def test_projections_with_scales_of_their_own_are_not_written_as_one_layer():
    generator = torch.Generator().manual_seed(0)
    fmt = get_format("nvfp4")
    gate, up = (fmt.quantize(size * torch.randn(32, 64, generator=generator)) for size in (1.0, 3.0))
    names = ("mlp.gate_proj", "mlp.up_proj")
    with pytest.raises(FormatError, match=r"mlp\.gate_proj, mlp\.up_proj are read as one layer.*global_scale"):
        stored_group(names, fmt.join([gate, up]))
    together = fmt.quantize(torch.randn(64, 64, generator=generator), segments=(32, 32))
    stored = stored_group(names, together)
    assert torch.equal(stored["mlp.up_proj.weight_packed"], together.tensors["packed"][32:])
    assert torch.equal(stored["mlp.gate_proj.weight_global_scale"], stored["mlp.up_proj.weight_global_scale"])


def test_a_packed_head_is_named_as_such(written):
    config = json.loads((written / "config.json").read_text())
    (written / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    change(written, lambda tensors: tensors.update({"lm_head.weight_packed": torch.zeros(4, 4, dtype=torch.uint8)}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is stored quantized"):
        quantized(written)


@pytest.mark.parametrize(
    ("value", "message"),
    [("nonsense", "quantization_config is unusable.*a JSON object"), (None, None)],
)
def test_a_quantization_config_that_is_none(tmp_path, value, message):
    folder = tmp_path / "m"
    shutil.copytree(DEMO, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": value}))
    if message is None:
        assert ModelSpec.from_folder(folder).packed_layout is None
    else:
        with pytest.raises(CheckpointError, match=message):
            ModelSpec.from_folder(folder)


def test_numbers_written_as_text_are_shown_as_such(written):
    config = json.loads((written / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = "16"
    (written / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"group_size='16'.*group_size=16"):
        ModelSpec.from_folder(written)


def test_the_feedback_factor_is_that_of_the_inverse_in_order():
    x_TI = torch.randn(300, 40, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.2, 3, 40)
    moments_II = (x_TI.T @ x_TI / 300).contiguous()
    before = moments_II.clone()
    upper_II, order_I, damping = feedback_factor(moments_II)
    assert torch.equal(moments_II, before)
    damped_II = moments_II.double()[order_I][:, order_I] + damping * moments_II.diagonal().mean() * torch.eye(40)
    torch.testing.assert_close(upper_II.double().T @ upper_II.double(), damped_II.inverse(), rtol=1e-4, atol=1e-5)

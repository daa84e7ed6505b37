"""Which layers are compiled for before the first step, and for how many tokens."""

import pytest
import torch
from tiny_models import load_tiny, write_tiny

from qerl.config.load import load_config
from qerl.config.schema import QuantConfig
from qerl.train import ready


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    write_tiny(path)
    return path


@pytest.fixture
def asked(monkeypatch):
    """Calls of the compiler, on a device that has the kernels."""
    calls = []
    monkeypatch.setattr(ready, "served", lambda device, dtype: True)
    monkeypatch.setattr(ready, "compile_ahead", lambda layers, rows: calls.append((layers, rows)))
    return calls


@pytest.mark.parametrize(("kl", "half"), [(0.0, False), (0.1, False), (0.1, True)])
def test_one_layer_of_each_kind_with_adapters_and_for_the_reference_without(folder, asked, kl, half):
    config = load_config(None, ["lora.rank=2", f"objective.kl_coef={kl}", "train.token_budget=4096"])
    model = load_tiny(
        folder, lora=config.lora, quant=QuantConfig(format="nvfp4"), dtype=torch.bfloat16, float32_stream=True, float16_attention=half,
    )  # fmt: skip
    ready.compile_kernels(config, model)
    ((layers, rows),) = asked
    assert rows == 4096
    linears = list(model.grouped_linears())[:4]
    found = {(layer.weight.shape, layer.dtype, len(layer.adapters)) for layer in layers}
    wide = ("o_proj", "down_proj", *(["qkv_proj"] if half else []))
    members = [
        (linear.weight.shape, torch.float32 if linear.name.endswith(wide) else torch.bfloat16, count)
        for linear in linears
        for count in ((len(linear.parts), 0) if kl else (len(linear.parts),))
    ]
    assert found == set(members) and len(layers) == len(members)


def test_weights_that_learn_and_devices_without_the_kernels_are_left_out(folder, asked, monkeypatch):
    config = load_config(None, ["train.mode=full", "quant.format=bf16"])
    ready.compile_kernels(config, load_tiny(folder, full=True))
    monkeypatch.undo()
    ready.compile_kernels(load_config(None, []), load_tiny(folder))
    assert not asked


def test_a_compiler_that_fails_is_a_note_in_one_line_and_the_run_goes_on(folder, asked, monkeypatch):
    def refuse(layers, rows):
        raise RuntimeError("no\nroom")

    monkeypatch.setattr(ready, "compile_ahead", refuse)
    config = load_config(None, ["lora.rank=2"])
    model = load_tiny(folder, lora=config.lora, quant=QuantConfig(format="nvfp4"), dtype=torch.bfloat16)
    note = ready.compile_kernels(config, model)
    assert note is not None and note.endswith("RuntimeError: no room") and "\n" not in note

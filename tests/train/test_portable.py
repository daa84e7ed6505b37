"""Portable checkpoints: what the codecs keep, by hand and by bound, and how large the file is."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl.errors import CheckpointError
from qerl.metrics.run_dir import RunDir
from qerl.train.portable import (
    expand_portable,
    is_portable,
    linear8,
    linear8_values,
    log8,
    log8_values,
    write_portable,
    write_portable_run,
)

PREFIX = "base_model.model.model.layers.0"


def trained(rows=24, width=512, seed=0):
    """Tensors as training leaves them: uniform A, small normal B, moments of many sizes, a norm near 2."""
    generator = torch.Generator().manual_seed(seed)
    a = (torch.rand(rows, width, generator=generator) * 2 - 1) * width**-0.5
    b = torch.randn(width, rows, generator=generator) * 1e-3
    norm = 2 + torch.randn(width, generator=generator) * 1e-5
    return {"A": a, "B": b, "norm": norm}


def write_checkpoint(folder, tensors, seed=1):
    generator = torch.Generator().manual_seed(seed)
    folder.mkdir(parents=True)
    names = {"A": f"{PREFIX}.mlp.up_proj.lora_A.weight", "B": f"{PREFIX}.mlp.up_proj.lora_B.weight"}
    names["norm"] = f"{PREFIX}.input_layernorm.weight"
    save_file({names[key]: tensor for key, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    state = {}
    for index, tensor in enumerate(tensors.values()):
        size = torch.exp(1.5 * torch.randn(tensor.shape, generator=generator))
        state[index] = {
            "step": torch.tensor(7.0),
            "exp_avg": 1e-4 * size * torch.randn(tensor.shape, generator=generator),
            "exp_avg_sq": 1e-8 * size**2,
        }
    groups = [{"lr": 1e-5, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "params": [0, 1, 2]}]
    torch.save({"state": state, "param_groups": groups}, folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"version": 1, "step": 7}))
    (folder / "adapter_config.json").write_text("{}")
    return state


def test_linear_codes_by_hand():
    codes, scales = linear8(torch.tensor([1.27, -0.64, 0.0, 0.004]))
    assert codes.tolist() == [127, -64, 0, 0]
    assert scales == pytest.approx([1.27])
    assert linear8_values(codes, scales).tolist() == pytest.approx([1.27, -0.64, 0.0, 0.0])


def test_log_codes_by_hand():
    codes, scales = log8(torch.tensor([8.0, 4.0, 8 * 2**-0.25, 0.0]))
    assert codes.tolist() == [255, 243, 252, 0]
    assert log8_values(codes, scales).tolist() == pytest.approx([8.0, 4.0, 8 * 2**-0.25, 0.0])


def test_errors_stay_within_what_the_codecs_promise():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(3))
    codes, scales = linear8(values)
    bound = torch.from_numpy(np.repeat(scales, 256)[:1000]) / 254
    assert ((linear8_values(codes, scales) - values).abs() <= bound * 1.0001).all()
    sizes = torch.exp(2 * values)
    codes, scales = log8(sizes)
    assert (log8_values(codes, scales) / sizes).log2().abs().max() <= 1 / 24 + 1e-6


def test_values_far_below_their_block_are_raised_and_never_become_zero():
    codes, scales = log8(torch.tensor([1.0, 1e-20]))
    assert log8_values(codes, scales)[1] == pytest.approx(2 ** (-254 / 12))


def test_a_checkpoint_comes_back_with_its_norms_steps_and_groups_exact(tmp_path):
    tensors = trained()
    before = write_checkpoint(tmp_path / "whole", tensors)
    write_portable(tmp_path / "whole", tmp_path / "small")
    assert is_portable(tmp_path / "small") and not is_portable(tmp_path / "whole")
    expand_portable(tmp_path / "small")
    assert not is_portable(tmp_path / "small")
    adapter = load_file(tmp_path / "small" / "adapter_model.safetensors")
    assert torch.equal(adapter[f"{PREFIX}.input_layernorm.weight"], tensors["norm"])
    for key in "AB":
        loaded = adapter[f"{PREFIX}.mlp.up_proj.lora_{key}.weight"]
        assert loaded.dtype == torch.float32
        assert torch.equal(loaded.bfloat16(), tensors[key].bfloat16())
    optimizer = torch.load(tmp_path / "small" / "optimizer.pt", weights_only=True)
    assert optimizer["param_groups"][0]["betas"] == (0.9, 0.99)
    for index, entry in before.items():
        found = optimizer["state"][index]
        assert found["step"] == entry["step"] and found["step"].shape == ()
        for key in ("exp_avg", "exp_avg_sq"):
            assert found[key].shape == entry[key].shape
        exact = index == 2
        assert torch.equal(found["exp_avg_sq"], entry["exp_avg_sq"]) == exact
        ratio = (found["exp_avg_sq"] / entry["exp_avg_sq"]).sqrt().log2().abs().max()
        assert ratio <= 1 / 24 + 1e-5
    assert json.loads((tmp_path / "small" / "trainer_state.json").read_text())["portable"] == [7]


def test_carrying_twice_changes_nothing_more_and_is_counted(tmp_path):
    write_checkpoint(tmp_path / "whole", trained())
    write_portable(tmp_path / "whole", tmp_path / "one")
    write_portable(tmp_path / "one", tmp_path / "two")
    expand_portable(tmp_path / "two")
    write_portable(tmp_path / "two", tmp_path / "three")
    expand_portable(tmp_path / "three")
    two, three = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("two", "three"))
    assert all(torch.equal(two[name], three[name]) for name in two)
    assert json.loads((tmp_path / "three" / "trainer_state.json").read_text())["portable"] == [7, 7]


def test_rank_32_on_a_half_billion_model_fits_in_60_megabytes(tmp_path):
    """Bits a parameter on tensors of realistic spread, times the parameters of Qwen2.5-0.5B with all seven targets."""
    tensors = trained(rows=32, width=4864)
    write_checkpoint(tmp_path / "whole", tensors)
    write_portable(tmp_path / "whole", tmp_path / "small")
    size = (tmp_path / "small" / "portable.npz").stat().st_size
    hidden, inner, kv, layers, rank = 896, 4864, 128, 24, 32
    pairs = [(hidden, hidden), (hidden, kv), (hidden, kv), (hidden, hidden), *[(hidden, inner)] * 2, (inner, hidden)]
    parameters = layers * rank * sum(i + o for i, o in pairs)
    assert parameters == 17_596_416
    norms = 2 * layers * hidden * 12
    total = size * parameters / sum(t.numel() for key, t in tensors.items() if key != "norm") + norms
    assert 40e6 < total < 60e6


@pytest.mark.parametrize("damage", ["empty", "no archive", "half", "a byte"])
def test_a_damaged_file_is_an_error(tmp_path, damage):
    """A copy that was cut off or has a wrong byte too, which end in exceptions of zipfile and zlib."""
    write_checkpoint(tmp_path / "whole", trained())
    write_portable(tmp_path / "whole", tmp_path / "small")
    path = tmp_path / "small" / "portable.npz"
    whole = path.read_bytes()
    middle = len(whole) // 2
    wrong = whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :]
    path.write_bytes({"empty": b"", "no archive": b"not a zip", "half": whole[:middle], "a byte": wrong}[damage])
    with pytest.raises(CheckpointError, match="cannot be read"):
        expand_portable(tmp_path / "small")


@pytest.mark.parametrize("content", [b"", b"broken\n", b"\x80\x02X\x01\x00\x00\x00\xff."])
def test_no_portable_form_is_made_of_a_damaged_optimizer(tmp_path, content):
    write_checkpoint(tmp_path / "whole", trained())
    (tmp_path / "whole" / "optimizer.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read"):
        write_portable(tmp_path / "whole", tmp_path / "small")
    assert not (tmp_path / "small").exists()


def test_a_checkpoint_without_an_adapter_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="adapter"):
        write_portable(tmp_path / "empty", tmp_path / "small")
    assert not (tmp_path / "small").exists()


def test_a_portable_run_leaves_records_adapters_and_texts_behind(tmp_path):
    run = RunDir.create(tmp_path / "run")
    run.write_text("config.resolved.yaml", "train: {steps: 9}\n")
    run.append_metrics(7, {})
    row = {"id": "q1", "question": "Long?", "answer": "4", "accuracy": 1.0}
    run.write_evaluation(0, [row | {"answers": [{"text": "long " * 99, "parsed": "4", "outcome": "correct"}]}])
    (run.adapters_dir / "rollout-000001").mkdir(parents=True)
    write_checkpoint(run.checkpoint(5), trained(seed=5))
    write_checkpoint(run.checkpoint(7), trained(seed=7))
    size = write_portable_run(run, tmp_path / "portable")
    copy = RunDir.open(tmp_path / "portable")
    names = {str(path.relative_to(copy.path)) for path in copy.path.rglob("*") if path.is_file()}
    assert names == {
        "config.resolved.yaml",
        "metrics.jsonl",
        "evaluations/step-000000.jsonl",
        *(f"checkpoints/checkpoint-7/{name}" for name in ("adapter_config.json", "portable.npz", "trainer_state.json")),
    }
    assert size == sum((copy.path / name).stat().st_size for name in names)
    kept = copy.read_evaluation(0)[0]
    assert "long" not in str(kept) and "Long?" not in str(kept)
    assert (kept["id"], kept["answer"], kept["accuracy"]) == ("q1", "4", 1.0)
    assert (kept["answers"][0]["parsed"], kept["answers"][0]["outcome"]) == ("4", "correct")
    write_portable_run(run, tmp_path / "portable", checkpoint=False)
    assert not copy.checkpoints_dir.exists()
    assert math.isfinite(size)


def test_8_bit_moments_have_no_portable_form(tmp_path):
    write_checkpoint(tmp_path / "checkpoint-7", trained())
    optimizer = torch.load(tmp_path / "checkpoint-7" / "optimizer.pt", weights_only=True)
    optimizer["state"][0] = {"step": 7, "quantized": {"state1": torch.zeros(4, dtype=torch.uint8)}}
    torch.save(optimizer, tmp_path / "checkpoint-7" / "optimizer.pt")
    with pytest.raises(CheckpointError, match="8-bit moments have no portable form"):
        write_portable(tmp_path / "checkpoint-7", tmp_path / "out")
    assert not (tmp_path / "out").exists()

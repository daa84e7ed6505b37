"""Models of random weights that benchmarks make: held as loaded ones are."""

import importlib
from pathlib import Path

import pytest
import torch

from qerl import memory


@pytest.mark.parametrize("full", [False, True])
def test_small_unquantized_weights_are_read_by_kernels_but_where_they_train(monkeypatch, full):
    """Without a copy of the caller's, which would keep them from it."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1]))
    monkeypatch.setattr("qerl.kernels.fp4_linear.served", lambda device, dtype: True)
    synthetic, rollout = (importlib.import_module(f"benchmarks.{name}") for name in ("synthetic", "rollout"))
    shape = rollout.tiny(synthetic.model_spec("0.5B"))
    for dense_cache in (False, True):
        model = synthetic.random_model(shape, format="bf16", dense_cache=dense_cache, device="cpu", full=full)
        for linear in model.grouped_linears():
            assert (linear.weight.kept_OI is None) == (linear.dense_OI is not None) == full


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "nf4", "nf4_dq"])
@pytest.mark.parametrize(
    ("size", "gigabytes", "setting", "kept"),
    [
        ("0.5B", 140, "auto", True),
        ("0.5B", 12, "auto", False),
        ("0.5B", 12, "on", True),
        ("0.5B", 140, "off", False),
        ("1.5B", 140, "auto", True),
        ("3B", 140, "auto", False),
        ("7B", 140, "auto", False),
    ],
)
def test_rollouts_are_timed_with_the_copies_that_a_run_would_have(monkeypatch, format, size, gigabytes, setting, kept):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1]))
    synthetic, rollout = (importlib.import_module(f"benchmarks.{name}") for name in ("synthetic", "rollout"))
    monkeypatch.setattr(memory, "budget_of", lambda config, device: memory.budget_of_size(config, f"{gigabytes}GB"))
    assert rollout.keeps_copies(synthetic.model_spec(size), format, setting, torch.device("cuda")) == kept

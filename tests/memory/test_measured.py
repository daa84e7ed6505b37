"""The prediction against peaks that were measured on GPUs (``results/memory/``)."""

import json
from pathlib import Path

import pytest

from qerl import memory
from qerl.config.load import load_config
from qerl.model.spec import ModelSpec

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "results" / "memory").glob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_predicted_peak_is_within_five_percent_of_the_measured_one(path):
    found = json.loads(path.read_text())
    decided = [f"train.{key}={found[key]}" for key in ("checkpointing", "token_budget")]
    config = load_config(ROOT / "configs" / found["config"], decided)
    ledger = memory.predict(config, ModelSpec.from_config(found["model"]), device_type="cuda")
    measured = {stage: peaks["allocated"] * 1e9 for stage, peaks in found["measured"].items()}
    assert ledger.peak_phase == max(measured, key=measured.get)
    assert ledger.peak == pytest.approx(max(measured.values()), rel=0.05)
    for stage, size in measured.items():
        # Prompts are shorter than they may be, so keys and values, and prefill passes, take less than is set aside for them.
        assert size <= ledger.total(stage) <= 1.1 * size, stage

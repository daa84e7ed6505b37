"""A small matrix on the packaged model, with data as files: rendering the built-in set would take most of a short run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qerl.config.yaml_io import dump_yaml
from qerl.data.synthetic import arithmetic_problems

BASE: dict[str, Any] = {
    "model": {"path": "demo", "dtype": "float32"},
    "data": {"eval_limit": 8},
    "rollout": {"prompts_per_step": 4, "group_size": 4, "max_prompt_tokens": 96, "max_new_tokens": 24},
    "lora": {"rank": 2},
    "optim": {"lr": 1e-3},
    "aqn": {"num_stages": 2},
    "train": {"steps": 3, "save_every": 1, "keep_checkpoints": 1, "save_adapter_every": 0},
    "eval": {"every": 0, "noisy_draws": 0},
    "diagnostics": {"every": 10, "noise_draws": 2, "canary": False, "probe_prompts": 2, "probe_tokens": 16},
    "log": {"progress": "off", "completions": 0},
}
ARMS: list[dict[str, Any]] = [
    {"name": "plain", "label": "NVFP4 LoRA", "set": {"aqn.enabled": False}},
    {"name": "noisy", "label": "NVFP4 + AQN", "set": {"aqn.sigma_start": 0.1}},
]
MATRIX: dict[str, Any] = {
    "name": "small",
    "base": "base.yaml",
    "protocol": "mechanism",
    "arms": ARMS,
    "seeds": [0],
    "target": {"accuracy": 0.99},
    "detect": {"sd": 0.02},
}


def write_matrix(folder: Path, **changes: Any) -> Path:
    """``matrix.yaml`` and what it needs, with top-level keys changed."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "train.jsonl").exists():
        for split in ("train", "test"):
            rows = [asdict(problem) for problem in arithmetic_problems(split, 48)]
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = BASE["data"] | {"train": str(folder), "eval": str(folder)}
    (folder / "base.yaml").write_text(dump_yaml(BASE | {"data": data}))
    path = folder / "matrix.yaml"
    path.write_text(dump_yaml({**MATRIX, **changes}))
    return path

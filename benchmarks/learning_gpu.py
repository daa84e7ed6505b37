"""A short real run with every diagnostic on, and all of its metrics in one JSON file.

    QERL_MODELS=MODELS QERL_DATA=DATA python benchmarks/learning_gpu.py --out results/learning_gpu_05b.json [key=value …]

trains ``configs/gsm8k_05b_nvfp4_aqn.yaml`` (32 prompts x 8 answers of at most 512 tokens) for a few steps that pass through
stage 0, the largest and the smallest sigma, measures everything at every step, scores the last rollout again from its record,
and writes the rows of ``metrics.jsonl``, the settings, the machine and the command. ``key=value`` arguments override settings;
``--config`` takes another recipe.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.stored import command, environment
from qerl.config.load import load_config
from qerl.metrics.files import to_json, whole_file
from qerl.metrics.run_dir import RunDir
from qerl.train.rescore import rescore
from qerl.train.run import train

ROOT = Path(__file__).resolve().parents[1]

SETTINGS = (
    "train.steps=6",
    "aqn.num_stages=3",
    "optim.warmup_ratio=0.0",
    "diagnostics.every=1",
    "diagnostics.probe_tokens=256",
    "diagnostics.noise_draws=8",
    "train.save_every=0",
    "train.save_adapter_every=1",
    "eval.before=false",
    "eval.after=false",
    "eval.every=0",
    "log.progress=plain",
)
SHOWN = (
    "accuracy",
    "groups/mixed",
    "aqn/sigma",
    "probe/entropy_tempered/by_token",
    "probe/entropy_mixture/by_token",
    "probe/information/by_token",
    "answers/information_low",
    "mismatch/kernel/mean_abs_prob_difference",
    "mismatch/noise/mean_abs_prob_difference",
    "mismatch/staleness/mean_abs_prob_difference",
    "perturbation/q/relative",
    "perturbation/q_k/dependence",
    "paths/distinct_correct",
    "canary/own/adapters_effect",
    "canary/own/adapters_share",
    "canary/own/engine_difference",
    "time/diagnostics",
    "time/step",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "gsm8k_05b_nvfp4_aqn.yaml")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(arguments.config, [*SETTINGS, f"run.dir={folder}", *arguments.settings])
        run = RunDir.open(train(config))
        scored = rescore(run.path)
        result = {
            "command": command(),
            "environment": environment(),
            "config": {k: v for k, v in config.model_dump(mode="json").items() if k != "run"},
            "metrics": run.read_metrics(),
            "rescore": asdict(scored) | {"within": scored.within, "tolerance": asdict(scored.tolerance)},
            "summary": run.read_json(run.summary_path),
        }
    with whole_file(arguments.out) as temporary:
        temporary.write_text(compact(result), encoding="utf-8")
    show(result["metrics"])
    print(f"rescore: largest {scored.largest:.3g}, mean {scored.mean:.3g}, within tolerance: {scored.within}")
    print(f"written: {arguments.out}")


def compact(result: dict[str, Any]) -> str:
    """JSON with one line a step and seven digits a number: small, and readable in a diff."""
    rows = [json.dumps(to_json(_rounded(row)), allow_nan=False) for row in result["metrics"]]
    rest = {key: value for key, value in result.items() if key != "metrics"}
    text = json.dumps(to_json(rest), indent=1, ensure_ascii=False, allow_nan=False)
    return f'{text[:-2]},\n "metrics": [\n  ' + ",\n  ".join(rows) + "\n ]\n}\n"


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {key: float(f"{value:.7g}") if isinstance(value, float) else value for key, value in row.items()}


def show(rows: list[dict[str, Any]]) -> None:
    """The main diagnostics by step."""
    for key in SHOWN:
        cells = [row.get(key) for row in rows if row["step"] > 0]
        print(f"{key:45}", *("       –" if value is None else f"{value:8.3g}" for value in cells))


if __name__ == "__main__":
    main()

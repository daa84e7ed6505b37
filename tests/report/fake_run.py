"""A plausible run folder, made without training: what the report and its tests read."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

from qerl.config.schema import Config
from qerl.config.yaml_io import dump_yaml
from qerl.metrics.run_dir import RunDir

OUTCOMES = ("correct", "wrong", "unparsable", "truncated", "unscorable")
OVERRIDES: dict[str, dict[str, Any]] = {
    "model": {"path": "demo", "dtype": "float32"},
    "lora": {"rank": 16},
    "aqn": {"sigma_start": 0.05, "sigma_end": 0.0005},
    "data": {"train": "arithmetic", "eval": "arithmetic", "eval_limit": 500},
    "rollout": {"max_new_tokens": 64, "max_prompt_tokens": 64},
    "optim": {"lr": 3.0e-4},
    "eval": {"every": 10},
}


def write_fake_run(
    path: Path, *, steps: int = 40, done: int | None = None, finished: bool = True, seed: int = 0
) -> RunDir:
    """Writes a run folder of ``steps`` planned steps, ``done`` of them made; unfinished ones have no summary."""
    rng = random.Random(seed)
    done = steps if done is None else done
    run = RunDir.create(path)
    config = Config.model_validate({**OVERRIDES, "train": {"steps": steps}, "run": {"name": path.name}})
    run.write_text(run.config_path, dump_yaml(config.model_dump(mode="json")))
    run.write_json(
        run.env_path,
        {
            "python": "3.11.2",
            "platform": "Linux x86_64",
            "cpu": {"count": 2, "model": "Example CPU @ 2.60GHz"},
            "gpu": None,
            "versions": {"torch": "2.13.0", "transformers": "5.24.0", "qerl": "0.1.0"},
            "command": f"qerl train configs/demo.yaml run.name={path.name}",
        },
    )
    run.append_metrics(0, evaluation_metrics(0.442, 500))
    tokens = 0
    for step in range(1, done + 1):
        row = step_metrics(step, steps, rng)
        tokens += int(row["tokens/prompt"] + row["tokens/completion"])
        row["num_tokens"] = tokens
        if step % config.eval.every == 0:
            row |= evaluation_metrics(0.46 + 0.45 * logistic(step, steps), 500)
        run.append_metrics(step, row)
        if step in (1, done // 2, done):
            run.write_rollout_parquet(step - 1, behavior_rows(step - 1, logistic(step, steps), rng))
            run.write_completions_text(step, "A readable answer.\n")
    for step in {0, done}:
        run.write_evaluation(step, question_rows(0.44 if step == 0 else 0.9))
    write_memory(run)
    if finished:
        write_summary(run, steps, tokens)
    return run


def logistic(step: int, steps: int) -> float:
    return 1.0 / (1.0 + math.exp(-10.0 * (step / steps - 0.35)))


def step_metrics(step: int, steps: int, rng: random.Random) -> dict[str, float]:
    progress = logistic(step, steps)
    accuracy = min(0.98, 0.44 + 0.47 * progress + rng.gauss(0, 0.02))
    all_correct = max(0.0, 0.06 + 0.62 * progress + rng.gauss(0, 0.03))
    all_wrong = max(0.0, 0.16 * (1 - progress) + rng.gauss(0, 0.01))
    truncated = max(0.0, 0.05 * (1 - progress) + rng.gauss(0, 0.01))
    stage = min(9, 10 * (step - 1) // steps)
    noise = 0.0 if stage == 0 else 0.05 * (0.01 ** ((stage - 1) / 8))
    length = 24 + 9 * progress + rng.gauss(0, 0.6)
    answer_tokens = int(256 * length)
    unparsable = 0.06 * (1 - progress) ** 2
    cut = 0.04 * (1 - progress)
    difference = 2e-6 * (1 + 0.3 * rng.random())
    seconds = {
        "rollout": 0.62,
        "reward": 0.03,
        "logprobs": 0.05,
        "backward": 0.5,
        "optimizer": 0.012,
        "noise": 0.004,
        "diagnostics": 0.01,
    }
    timing = {f"time/{name}": value * (1 + 0.12 * rng.random()) * length / 28 for name, value in seconds.items()}
    total = sum(timing.values()) + 0.02
    return (diagnostics_metrics(noise, rng) if step % 5 == 1 else {}) | {
        "policy_version": step,
        "reward": accuracy,
        "reward_std": math.sqrt(accuracy * (1 - accuracy)),
        "rewards/accuracy/mean": accuracy,
        "rewards/accuracy/std": math.sqrt(accuracy * (1 - accuracy)),
        "accuracy": accuracy,
        "entropy": 0.52 - 0.3 * progress + rng.gauss(0, 0.008),
        "loss": rng.gauss(0, 0.01),
        "grad_norm": 0.35 * math.exp(-1.5 * progress) + 0.03 * rng.random(),
        "learning_rate": 3e-4 * min(1.0, step / 4) * 0.5 * (1 + math.cos(math.pi * step / steps)),
        "clip_ratio/low_mean": 0.001 * rng.random(),
        "clip_ratio/high_mean": 0.002 * rng.random(),
        "clip_ratio/region_mean": 0.003 * rng.random(),
        "completions/mean_length": length,
        "completions/min_length": 4 + int(3 * rng.random()),
        "completions/max_length": 64 if cut > 0.004 else 52,
        "completions/clipped_ratio": cut,
        "completions/mean_terminated_length": length - 1,
        "frac_reward_zero_std": all_correct + all_wrong + truncated,
        "groups/mixed": 1.0 - all_correct - all_wrong - truncated,
        "groups/all_correct": all_correct,
        "groups/all_wrong": all_wrong,
        "groups/all_truncated": truncated,
        "groups/unscorable": 0.0,
        "outcomes/correct": accuracy,
        "outcomes/wrong": max(0.0, 1 - accuracy - unparsable - cut),
        "outcomes/unparsable": unparsable,
        "outcomes/truncated": cut,
        "outcomes/unscorable": 0.0,
        "sampling/sampling_logp_difference/mean": difference,
        "sampling/sampling_logp_difference/max": 40 * difference,
        "sampling/importance_sampling_ratio/min": 1 - 40 * difference,
        "sampling/importance_sampling_ratio/mean": 1.0,
        "sampling/importance_sampling_ratio/max": 1 + 40 * difference,
        "mismatch_kl": difference**2,
        "mean_abs_prob_difference": difference * 0.6,
        "effective_sample_size": 1.0,
        "aqn/sigma": noise,
        "aqn/stage": stage,
        "aqn/z_over_w_above_half": 0.0,
        "tokens/prompt": 256 * 30,
        "tokens/completion": answer_tokens,
        "dropped_prompts": 0,
        "answers/distinct": 4.5 - 2.5 * progress,
        "paths/distinct_correct": 1.5 + progress,
        "canary/own/adapters_effect": 0.02 * step,
        "canary/own/engine_difference": difference,
        **timing,
        "time/evaluate": 0.0,
        "time/save": 0.01,
        "time/compile": 0.9 if step == 1 else 0.0,
        "time/step": total,
        "tokens_per_second": (256 * 30 + answer_tokens) / total,
        "rollout/tokens_per_second": answer_tokens / timing["time/rollout"],
        "rollout/preemptions": 0.0,
        "memory/rss_gb": 0.9 + 0.1 * progress,
    }


def diagnostics_metrics(noise: float, rng: random.Random) -> dict[str, float]:
    information = 0.3 * noise**2
    entropies = {"tempered": 0.4, "conditional": 0.4, "mixture": 0.4 + information}
    found = {f"probe/entropy_{name}/by_token": value for name, value in entropies.items()}
    found["probe/information/by_token"] = information
    found |= {f"mismatch/{c}/mean_abs_prob_difference": v for c, v in (("kernel", 1e-6), ("staleness", 2e-3))}
    if noise:
        found["mismatch/noise/mean_abs_prob_difference"] = 0.3 * noise * (1 + 0.1 * rng.random())
        found |= {f"perturbation/{name}/relative": 0.6 * noise for name in ("q", "k", "v", "gate", "up")}
        found |= {f"perturbation/{pair}/dependence": 0.5 for pair in ("q_k", "q_v", "k_v", "gate_up")}
    return found


def evaluation_metrics(accuracy: float, count: int) -> dict[str, float]:
    low, high = wilson(accuracy, count)
    return {
        "eval/accuracy": accuracy,
        "eval/accuracy_low": low,
        "eval/accuracy_high": high,
        "eval/truncated": 0.04 * (1 - accuracy),
        "eval/unparsable": 0.08 * (1 - accuracy),
        "eval/mean_length": 26.0 + 6 * accuracy,
        "eval/count": count,
        "time/evaluate": 1.4,
    }


def wilson(accuracy: float, count: int, z: float = 1.959964) -> tuple[float, float]:
    center = (accuracy + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(accuracy * (1 - accuracy) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return center - half, center + half


def behavior_rows(rollout: int, progress: float, rng: random.Random) -> list[dict[str, Any]]:
    """Rows of 12 prompts x 4 answers about apples, right more often as ``progress`` goes to 1."""
    rows = []
    for key in range(48):
        if key % 4 == 0:
            first, second = rng.randrange(3, 60), rng.randrange(3, 60)
        right = rng.random() < 0.44 + 0.5 * progress
        outcome = "correct" if right else rng.choice(OUTCOMES[1:4])
        rows.append(behavior_row(rollout, key, first, second, outcome, rng))
    return rows


def behavior_row(rollout: int, key: int, first: int, second: int, outcome: str, rng: random.Random) -> dict[str, Any]:
    total = first + second if outcome == "correct" else first + second + rng.choice((-10, -1, 1, 10))
    text = f"Ann starts with {first} apples. She buys {second} more: {first} + {second} = {total}.\nThe answer is \\boxed{{{total}}}."
    if outcome == "unparsable":
        text = f"Ann has {first} apples & buys <b>{second}</b> more, so she has many."
    if outcome == "truncated":
        text = f"Ann starts with {first} apples. " * 8
    length = max(4, len(text) // 5)
    logprobs = [-0.5 * rng.random() for _ in range(length)]
    return {
        "prompt_id": f"train-{rollout * 12 + key // 4}",
        "sample_key": key,
        "prompt_token_ids": [1, 2, 3],
        "token_ids": [rng.randrange(57) for _ in range(length)],
        "completion_mask": [1] * length,
        "behavior_logprobs": logprobs,
        "sampler_logprobs": logprobs,
        "stop_reason": "length" if outcome == "truncated" else "stop",
        "reward": 1.0 if outcome == "correct" else 0.0,
        "parts": {"accuracy": 1.0 if outcome == "correct" else 0.0},
        "outcome": outcome,
        "parsed": None if outcome in ("unparsable", "truncated") else str(total),
        "note": None,
        "question": f"Ann has {first} apples and buys {second} more. How many apples does she have?",
        "answer": str(first + second),
        "text": text,
        "in_batch": True,
        "rollout": rollout,
        "group_size": 4,
        "policy_version": rollout,
        "adapter_hash": "0123456789abcdef",
        "norm_hash": "0123456789abcdef",
        "base_format": "nvfp4",
        "base_hash": "0123456789abcdef",
        "noise": None,
        "sampling": {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "max_new_tokens": 64,
            "seed": 0,
            "stream": "sample",
            "rollout": rollout,
        },
        "engine": "plain",
        "kernels": {"fp4_linear": "reference"},
        "cache_state": "empty",
    }


def question_rows(accuracy: float, count: int = 40) -> list[dict[str, Any]]:
    """Held-out questions of an evaluation; which are right depends on the accuracy, so that some are gained and some lost."""
    rows = []
    for index in range(count):
        first, second = 5 + 3 * index, 2 + (7 * index) % 41
        right = (index * 0.37) % 1.0 < accuracy and index % 13 != 5 * (accuracy > 0.5)
        silent = not right and index % 5 == 1
        said = first + second if right else first - second
        text = (
            f"Ann had {first} & got {second}, so she has <b>many</b>."
            if silent
            else f"{first} + {second} = {said}. The answer is \\boxed{{{said}}}."
        )
        rows.append(
            {
                "id": f"test-{index:03d}",
                "question": f"Ann has {first} apples and buys {second} more. How many apples does she have?",
                "answer": str(first + second),
                "accuracy": float(right),
                "answers": [
                    {
                        "text": text,
                        "parsed": None if silent else str(said),
                        "outcome": "correct" if right else "unparsable" if silent else "wrong",
                        "tokens": len(text) // 3,
                        "stop_reason": "stop",
                        "note": None,
                    }
                ],
            }
        )
    return rows


def write_memory(run: RunDir) -> None:
    predicted = {
        "base_weights": 190_000,
        "dense_cache": 1_350_000,
        "embeddings": 60_000,
        "norms": 3_500,
        "adapters": 430_000,
        "gradients": 433_000,
        "optimizer": 866_000,
        "kv_cache": 50_300_000,
        "activations": 212_000_000,
    }
    measured = {name: predicted[name] for name in ("base_weights", "dense_cache", "embeddings", "norms", "adapters")}
    measured |= {"optimizer": 866_512, "kv_cache": 41_000_000}
    run.write_json(
        run.memory_path,
        {
            "predicted": predicted,
            "measured": measured,
            "predicted_peaks": {"rollout": 53_200_000, "training": 215_332_500},
            "process": {"rss": 950_000_000, "rss_peak": 1_002_000_000},
        },
    )


def evaluation_summary(accuracy: float, count: int) -> dict[str, Any]:
    low, high = wilson(accuracy, count)
    return {
        "accuracy": accuracy,
        "low": low,
        "high": high,
        "confidence": 0.95,
        "count": count,
        "truncated": 0.04 * (1 - accuracy),
        "unparsable": 0.08 * (1 - accuracy),
        "mean_length": 26.0 + 6 * accuracy,
        "policy": {"temperature": 0.0, "top_p": 1.0, "samples": 1, "noise": None, "max_new_tokens": 64},
        "by_outcome": {"correct": round(accuracy * count), "wrong": count - round(accuracy * count)},
    }


def write_summary(run: RunDir, steps: int, tokens: int) -> None:
    run.write_json(
        run.summary_path,
        {
            "schema": 1,
            "run": run.path.name,
            "model": "demo",
            "steps": steps,
            "evaluation": {"before": evaluation_summary(0.442, 500), "after": evaluation_summary(0.912, 500)},
            "noisy": {
                "sigma": 0.0005,
                "accuracies": [0.908, 0.896],
                "mean": 0.902,
                "spread": 0.0085,
                "against_clean": {"difference": -0.01, "low": -0.022, "high": 0.002, "confidence": 0.95},
            },
            "paired": {
                "difference": 0.47,
                "low": 0.424,
                "high": 0.516,
                "confidence": 0.95,
                "gained": 247,
                "lost": 12,
                "p_value": 1e-50,
                "count": 500,
            },
            "wall_seconds": 71.3,
            "tokens": {"total": tokens, "prompt": 256 * 30 * steps, "completion": tokens - 256 * 30 * steps},
            "peak_memory": {"rss": 950_000_000, "rss_peak": 1_002_000_000},
            "stage_seconds": {
                "rollout": 26.1,
                "reward": 1.3,
                "logprobs": 2.2,
                "backward": 21.3,
                "optimizer": 0.5,
                "evaluate": 8.4,
            },
            "versions": {"qerl": "0.1.0", "torch": "2.13.0"},
            "warnings": ["The demo model's accuracy rises mostly because it selects the worked mode of answering."],
            "status": "finished",
        },
    )

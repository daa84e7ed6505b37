"""Scoring behavior records again: the log-probs of a rollout from its record and the adapter that was kept for it.

A record names the base weights, adapter, norms and tokenizer by hash and the noise by its key. All of them are checked, so
that a difference which remains is arithmetic: the engine's step-by-step passes against one packed pass of the trainer.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qerl.config.load import load_config
from qerl.config.schema import Config
from qerl.errors import ConfigError, RunFolderError
from qerl.metrics.behavior import read_behavior, read_run_facts
from qerl.metrics.run_dir import RunDir
from qerl.model.aqn import NoiseState
from qerl.model.checkpoint import adapter_hash, base_hash, norm_hash
from qerl.objective.batch import Sample, pack
from qerl.records import Completion, Prompt
from qerl.train.fit import within_budget
from qerl.train.learn import policy_logprobs
from qerl.train.session import Session, open_session

NO_ADAPTER = hashlib.sha256().hexdigest()[:16]
"""Adapter hash of a model without adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """What the differences of log-probs may be, in nats."""

    largest: float
    mean: float


TOLERANCES = {
    "float32": Tolerance(largest=1e-4, mean=1e-5),
    "bfloat16": Tolerance(largest=1.0, mean=2e-2),
}
"""By compute type. float32: matrix shapes round differently. bfloat16: one rounding is 2^-9 of a value, and an unlikely token
can meet many; the mean is what tells rounding (about .005) from a fault."""

FP8_TOLERANCE = Tolerance(largest=4.0, mean=0.2)
"""Where the engine kept keys or values in FP8 (``rollout.kv_format``), which recomputing does not: a mean of .01 to .08 is its rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescored:
    """Differences between recorded and recomputed log-probs; nats."""

    rollout: int
    rows: int
    tokens: int
    largest: float
    mean: float
    mean_abs_prob_difference: float
    worst: str
    """Where the largest difference is."""
    dtype: str
    kv_format: str
    noise: str
    """The noise that was replayed, in words."""

    @property
    def tolerance(self) -> Tolerance:
        return TOLERANCES[self.dtype] if self.kv_format == "compute" else FP8_TOLERANCE

    @property
    def within(self) -> bool:
        """Whether both figures are within the tolerance (NaN is not)."""
        return self.largest <= self.tolerance.largest and self.mean <= self.tolerance.mean


class _Rollouts:
    """Words of messages for whoever counts in rollouts, from 0."""

    word = "rollout"
    first = 0

    def name(self, index: int) -> str:
        return f"{self.word} {index + self.first}"

    def names(self, indices: Sequence[int]) -> str:
        """Up to a dozen of them."""
        shown = ", ".join(str(index + self.first) for index in indices[:12])
        return f"{self.word}s {shown}{' …' if len(indices) > 12 else ''}"


class _Steps(_Rollouts):
    """The same for steps, from 1: step s learned from rollout s - 1."""

    word = "step"
    first = 1


def rescore(
    path: str | Path,
    settings: Sequence[str] = (),
    *,
    step: int | None = None,
    rollout: int | None = None,
    rows: str | None = None,
) -> Rescored:
    """Recompute the log-probs of a rollout's records and compare.

    Args:
        path: run folder.
        settings: ``key=value`` overrides, such as where the model lies now.
        step: step of the run, 1 for the first; step s learned from rollout s - 1.
        rollout: index of the rollout instead; with neither, the newest whose adapter was kept.
        rows: rows of the record to score, as ``0-9,12``; None scores all.

    Raises:
        ConfigError: both ``step`` and ``rollout``, rows that do not exist, or weights, norms or a tokenizer that are not
            those of the record.
        RunFolderError: the rollout has no record, or its adapter was not kept.
        CheckpointError: the model or the adapter cannot be read.
    """
    run = RunDir.open(path)
    index = _chosen_rollout(run, step, rollout)
    count = _Steps() if step is not None else _Rollouts()
    records = read_behavior(_record_path(run, index, count))
    chosen = [records[i] for i in _parse_rows(rows, len(records))]
    adapter = _kept_adapter(run, index, str(records[0]["adapter_hash"]), count)
    config = load_config(run.config_path, settings)
    with within_budget(config):
        if config.train.mode == "full" and adapter is not None:
            # What was kept is the whole model; it does not stand on the one that training began with.
            config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(adapter)})})
            session = open_session(config)
        else:
            session = open_session(config, adapter=adapter, trainable=adapter is not None)
        _check_identity(session, records[0], read_run_facts(run.rollout_path(index)))
        state = None if records[0]["noise"] is None else NoiseState.from_dict(records[0]["noise"])
        return _compare(config, session, chosen, state, index)


@torch.no_grad()
def _compare(
    config: Config, session: Session, records: Sequence[dict[str, Any]], state: NoiseState | None, index: int
) -> Rescored:
    silent = state is None or state.silent
    noise = None if state is None or silent else state.materialize(session.model)
    temperature = records[0]["sampling"]["temperature"] or 1.0
    samples = [Sample(completion=_completion(record), advantage=0.0, in_loss=True) for record in records]
    recorded, computed = [], []
    for batch in pack(samples, config.pass_tokens, session.device):
        computed.append(policy_logprobs(session.model, batch, temperature, noise=noise)[0].double().cpu())
        recorded.append(batch.behavior_logprobs_N.double().cpu())
    first_N, second_N = torch.cat(recorded), torch.cat(computed)
    difference_N = (second_N - first_N).abs()
    return Rescored(
        rollout=index,
        rows=len(records),
        tokens=difference_N.numel(),
        largest=float(difference_N.max()),
        mean=float(difference_N.mean()),
        mean_abs_prob_difference=float((second_N.exp() - first_N.exp()).abs().mean()),
        worst=_place(records, int(difference_N.argmax())),
        dtype=config.model.dtype,
        kv_format=config.rollout.kv_format,
        noise="none" if state is None or silent else f"scope {state.scope}, stage {state.stage}, sigma {state.sigma:g}",
    )


def _completion(record: dict[str, Any]) -> Completion:
    prompt = Prompt(
        id=record["prompt_id"],
        question=record["question"],
        answer=record["answer"],
        text="",
        token_ids=tuple(record["prompt_token_ids"]),
    )
    return Completion(
        prompt=prompt,
        sample_key=record["sample_key"],
        token_ids=tuple(record["token_ids"]),
        text=record["text"],
        behavior_logprobs=tuple(record["behavior_logprobs"]),
        sampler_logprobs=tuple(record["sampler_logprobs"]),
        stop_reason=record["stop_reason"],
    )


def _place(records: Sequence[dict[str, Any]], token: int) -> str:
    """Row and answer token of a position in the concatenated answers."""
    for record in records:
        length = len(record["token_ids"])
        if token < length:
            return f"prompt {record['prompt_id']}, sample {record['sample_key']}, token {token} of {length}"
        token -= length
    raise AssertionError("position beyond the answers")


def _chosen_rollout(run: RunDir, step: int | None, rollout: int | None) -> int:
    if step is not None and rollout is not None:
        raise ConfigError("both a step and a rollout are named", got=f"--step {step} --rollout {rollout}")
    if step is not None:
        if step < 1:
            raise ConfigError(
                "steps are counted from 1", got=f"--step {step}", remedy="Step N learned from rollout N - 1"
            )
        return step - 1
    if rollout is not None:
        return rollout
    kept = [index for index, _ in run.rollout_paths() if run.adapter_path(index).is_dir()]
    recorded = [index for index, _ in run.rollout_paths()]
    if not recorded:
        raise RunFolderError("the run has no behavior records", got=run.rollouts_dir)
    return (kept or recorded)[-1]


def _record_path(run: RunDir, index: int, count: _Rollouts) -> Path:
    path = run.rollout_path(index)
    if not path.exists():
        found = [i for i, _ in run.rollout_paths()]
        raise RunFolderError(
            f"there is no record of {count.name(index)}",
            got=path,
            expected=f"one of the {count.names(found)}" if found else None,
        )
    return path


def _kept_adapter(run: RunDir, index: int, recorded_hash: str, count: _Rollouts) -> Path | None:
    """Folder of the rollout's adapter (full mode: model); None when it was sampled without adapters."""
    if run.adapter_path(index).is_dir():
        return run.adapter_path(index)
    if recorded_hash == NO_ADAPTER:
        return None
    kept = [i for i, _ in run.rollout_paths() if run.adapter_path(i).is_dir()]
    raise RunFolderError(
        f"the adapter (or model) that {count.name(index)} was sampled with was not kept, so it cannot be scored again",
        got=run.adapter_path(index),
        expected=f"one of the {count.names(kept)}" if kept else None,
        remedy="Train with train.save_adapter_every=1 to keep that of every rollout",
    )


def _check_identity(session: Session, record: dict[str, Any], facts: dict[str, str]) -> None:
    """Everything but the arithmetic must be what it was."""
    model = session.model
    checks: tuple[tuple[str, Callable[[], str], str | None, str], ...] = (
        (
            "tokenizer",
            lambda: session.tokenizer.tokenizer_hash,
            facts.get("tokenizer_hash"),
            "Give the folder the run was made with, as model.path=…",
        ),
        (
            "base weights",
            lambda: base_hash(model),
            record["base_hash"],
            "Give the folder the run was made with, as model.path=…, and its quant settings",
        ),
        (
            "trained weights" if model.full else "adapter",
            lambda: adapter_hash(model),
            record["adapter_hash"],
            "The kept adapter was changed or replaced",
        ),
        ("norm scales", lambda: norm_hash(model), record["norm_hash"], "The kept adapter was changed or replaced"),
    )
    for what, compute, expected, remedy in checks:
        if what == "base weights" and model.full:
            continue
        got = compute()
        if expected is not None and got != expected:
            raise ConfigError(
                f"the {what} {'are' if what.endswith('s') else 'is'} not what the record was made with",
                got=f"hash {got}",
                expected=f"hash {expected}",
                remedy=remedy,
            )


def _parse_rows(text: str | None, count: int) -> list[int]:
    """Row numbers of ``0-9,12``."""
    if text is None:
        return list(range(count))
    chosen: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        last = int(match[2] or match[1]) if match else count
        if match is None or last >= count or last < int(match[1]):
            raise ConfigError(
                "--rows does not name rows of the record",
                got=text,
                expected=f"numbers from 0 to {count - 1}, as 0-9,12",
            )
        chosen += range(int(match[1]), last + 1)
    return chosen

"""The behavior-policy record: what a sample was drawn from, in enough detail to score it again.

One row a sample, one parquet file a rollout. Column types are fixed here, so files of one run (and of two runs) can be
read together. What holds for the whole run lies in the schema metadata under the key ``qerl.run``.

No torch: the records are only named in annotations.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.metrics.files import damaged_file

if TYPE_CHECKING:
    import pyarrow as pa

    from qerl.records import Completion, Group, Rollout, SamplingSpec, Score

RUN_FACTS_KEY = b"qerl.run"
MAP_COLUMNS = ("kernels", "parts")


def behavior_rows(rollout: Rollout, groups: Sequence[Group], in_batch: Sequence[bool]) -> list[dict[str, Any]]:
    """The rows of one rollout, in the order of its completions.

    Args:
        rollout: the answers, the sampler and the policy they came from.
        groups: the same answers with their scores, prompt-major.
        in_batch: by group, whether it was trained on (dynamic sampling leaves some out).

    Returns:
        One dict a sample, with the columns of ``behavior_schema``.
    """
    scores = [score for group in groups for score in group.scores]
    assert len(scores) == len(rollout.completions), "one score a completion"
    shared = _rollout_columns(rollout)
    kept = [flag for flag, group in zip(in_batch, groups, strict=True) for _ in group.scores]
    noise = rollout.policy.noise
    of_all = {} if noise is None else noise.to_dict()
    return [
        {
            **_sample_columns(completion, score),
            "in_batch": flag,
            **shared,
            # With the scope key of the sample; ``NoiseState.from_dict`` reads it back.
            "noise": None if noise is None else {**of_all, "key": noise.scope_key(completion.sample_key)},
        }
        for completion, score, flag in zip(rollout.completions, scores, kept, strict=True)
    ]


def _rollout_columns(rollout: Rollout) -> dict[str, Any]:
    """Columns that are the same for every sample of a rollout."""
    policy = rollout.policy
    return {
        "rollout": rollout.index,
        "group_size": rollout.group_size,
        "policy_version": policy.policy_version,
        "adapter_hash": policy.adapter_hash,
        "norm_hash": policy.norm_hash,
        "base_format": policy.base_format,
        "base_hash": policy.base_hash,
        "sampling": _sampling_column(rollout.sampling),
        "engine": rollout.engine,
        "kernels": dict(rollout.kernels),
        "cache_state": rollout.cache_state,
    }


def _sampling_column(sampling: SamplingSpec) -> dict[str, Any]:
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_new_tokens": sampling.max_new_tokens,
        "seed": sampling.seed,
        "stream": sampling.stream,
        "rollout": sampling.rollout,
    }


def _sample_columns(completion: Completion, score: Score) -> dict[str, Any]:
    prompt = completion.prompt
    return {
        "prompt_id": prompt.id,
        "sample_key": completion.sample_key,
        "prompt_token_ids": list(prompt.token_ids),
        "token_ids": list(completion.token_ids),
        "completion_mask": [1] * len(completion.token_ids),
        "behavior_logprobs": list(completion.behavior_logprobs),
        "sampler_logprobs": list(completion.sampler_logprobs),
        "stop_reason": completion.stop_reason,
        "reward": score.reward,
        "parts": dict(score.parts),
        "outcome": score.outcome.value,
        "parsed": score.parsed,
        "note": score.note,
        "question": prompt.question,
        "answer": prompt.answer,
        "text": completion.text,
    }


def behavior_schema() -> pa.Schema:
    """Column types of the records. Log-probs are float32, as the engine computed them."""
    import pyarrow as pa

    text, token_ids, logprobs = pa.string(), pa.list_(pa.int32()), pa.list_(pa.float32())
    return pa.schema(
        [
            ("prompt_id", text),
            ("sample_key", pa.int64()),
            ("prompt_token_ids", token_ids),
            ("token_ids", token_ids),
            ("completion_mask", pa.list_(pa.int8())),
            ("behavior_logprobs", logprobs),
            ("sampler_logprobs", logprobs),
            ("stop_reason", text),
            ("reward", pa.float64()),
            ("parts", pa.map_(text, pa.float64())),
            ("outcome", text),
            ("parsed", text),
            ("note", text),
            ("question", text),
            ("answer", text),
            ("text", text),
            ("in_batch", pa.bool_()),
            ("rollout", pa.int64()),
            ("group_size", pa.int32()),
            ("policy_version", pa.int64()),
            ("adapter_hash", text),
            ("norm_hash", text),
            ("base_format", text),
            ("base_hash", text),
            ("noise", _noise_type()),
            ("sampling", _sampling_type()),
            ("engine", text),
            ("kernels", pa.map_(text, text)),
            ("cache_state", text),
        ]
    )


def _noise_type() -> pa.DataType:
    import pyarrow as pa

    return pa.struct(
        [
            ("seed", pa.uint64()),
            ("stream", pa.string()),
            ("rollout", pa.int64()),
            ("scope", pa.string()),
            ("key", pa.int64()),
            ("stage", pa.int32()),
            ("sigma", pa.float64()),
            ("magnitude", pa.string()),
            ("sites", pa.list_(pa.string())),
            ("group_size", pa.int32()),
            ("prompt", pa.string()),
            ("mode", pa.string()),
            ("sharing", pa.string()),
            ("factor", pa.float64()),
            ("site_scales", pa.list_(pa.float64())),
            ("kl_target", pa.float64()),
            ("history", pa.list_(pa.list_(pa.float64()))),
        ]
    )


def _sampling_type() -> pa.DataType:
    import pyarrow as pa

    return pa.struct(
        [
            ("temperature", pa.float64()),
            ("top_p", pa.float64()),
            ("top_k", pa.int64()),
            ("min_p", pa.float64()),
            ("max_new_tokens", pa.int64()),
            ("seed", pa.uint64()),
            ("stream", pa.string()),
            ("rollout", pa.int64()),
        ]
    )


def write_behavior(path: Path, rows: Sequence[Mapping[str, Any]], run_facts: Mapping[str, str]) -> None:
    """Writes rows to a parquet file. ``metrics.run_dir`` calls this under a temporary name.

    Args:
        path: file to write.
        rows: rows of ``behavior_rows``.
        run_facts: what holds for the whole run, e.g. checkpoint path and hash, tokenizer and template hashes.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = behavior_schema().with_metadata({RUN_FACTS_KEY: json.dumps(dict(run_facts)).encode()})
    columns = set(schema.names)
    for row in rows:
        assert row.keys() == columns, f"columns {sorted(row.keys() ^ columns)} are missing or unknown"
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows], schema=schema), path, compression="zstd")


def read_behavior(path: str | Path, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The rows of a behavior file, equal to those that were written.

    Args:
        path: parquet file.
        columns: columns to read; None reads all.

    Raises:
        RunFolderError: the file is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with damaged_file(Path(path), "a parquet file of behavior records", pa.ArrowException):
        table = pq.read_table(path, columns=list(columns) if columns is not None else None)
    rows: list[dict[str, Any]] = table.to_pylist()
    for row in rows:
        for name in MAP_COLUMNS:
            if name in row:
                row[name] = dict(row[name])
    return rows


def read_run_facts(path: str | Path) -> dict[str, str]:
    """The once-a-run facts of a behavior file."""
    import pyarrow.parquet as pq

    metadata = pq.read_schema(path).metadata or {}
    facts: dict[str, str] = json.loads(metadata.get(RUN_FACTS_KEY, b"{}"))
    return facts

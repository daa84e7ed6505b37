"""The fixed probe set: prompts with one answer each, at whose tokens entropies are taken.

An entropy changes when the policy does and when the contexts do. On a fixed set only the policy changes, so values of
different steps, and of runs that share a set (``diagnostics.probe``), can be compared.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qerl.config.schema import Config
from qerl.errors import ConfigError, RunFolderError
from qerl.metrics.run_dir import RunDir
from qerl.model.spec import ModelSpec
from qerl.model.tokenizer import Tokenizer
from qerl.records import Completion, Prompt, SamplingSpec
from qerl.train.session import Session

PROBE_VERSION = 1
PROBE_STREAM = "probe"
PROBE_SEED = 0
"""Not the run's seed: runs that differ by seed alone have one probe set."""


def open_probe(config: Config, run: RunDir, session: Session, prompts: Sequence[Prompt]) -> tuple[Completion, ...]:
    """The run's probe set: from its folder, else from ``diagnostics.probe``, else made now; kept in the folder.

    Must first be called before the first update, since it asks the base model (adapters and noise off).

    Raises:
        ConfigError: the file cannot be read or belongs to another tokenizer.
        RunFolderError: the folder's own file is damaged.
    """
    if run.probe_path.exists():
        return _read(run.probe_path, session.tokenizer, RunFolderError)
    if config.diagnostics.probe is not None:
        found = read_probe(config.diagnostics.probe, session.tokenizer, session.model.spec)
    else:
        found = _make(config, session, prompts)
    run.write_json(run.probe_path, _to_json(found, session))
    return found


def read_probe(source: str, tokenizer: Tokenizer, spec: ModelSpec) -> tuple[Completion, ...]:
    """The probe set of ``diagnostics.probe``.

    Raises:
        ConfigError: the file cannot be read, belongs to another tokenizer, or is longer than the model has positions.
    """
    found = _read(Path(source), tokenizer, ConfigError)
    longest = max(len(item.prompt.token_ids) + len(item.token_ids) for item in found)
    if longest > spec.max_positions:
        raise ConfigError(
            "the probe set has a sequence that the model has no positions for",
            got=f"{source}: {longest} tokens",
            expected=f"at most {spec.max_positions}",
        )
    return found


def cut(completion: Completion, tokens: int) -> Completion:
    """The first ``tokens`` tokens of an answer; its text stays whole."""
    if len(completion.token_ids) <= tokens:
        return completion
    return Completion(
        prompt=completion.prompt,
        sample_key=completion.sample_key,
        token_ids=completion.token_ids[:tokens],
        text=completion.text,
        behavior_logprobs=completion.behavior_logprobs[:tokens],
        sampler_logprobs=completion.sampler_logprobs[:tokens],
        stop_reason="length",
    )


def _make(config: Config, session: Session, prompts: Sequence[Prompt]) -> tuple[Completion, ...]:
    sampling = SamplingSpec(
        temperature=config.rollout.temperature,
        max_new_tokens=min(config.diagnostics.probe_tokens, config.rollout.max_new_tokens),
        seed=PROBE_SEED,
        stream=PROBE_STREAM,
    )
    chosen = prompts[: config.diagnostics.probe_prompts]
    return session.engine.generate(chosen, sampling, adapters=False)[0]


def _to_json(probe: Sequence[Completion], session: Session) -> dict[str, Any]:
    return {
        "version": PROBE_VERSION,
        "tokenizer_hash": session.tokenizer.tokenizer_hash,
        "items": [
            {
                "prompt_id": item.prompt.id,
                "question": item.prompt.question,
                "reference": item.prompt.answer,
                "prompt": item.prompt.text,
                "prompt_token_ids": list(item.prompt.token_ids),
                "answer": item.text,
                "token_ids": list(item.token_ids),
                "stop_reason": item.stop_reason,
            }
            for item in probe
        ],
    }


def _read(path: Path, tokenizer: Tokenizer, error_class: type[ConfigError | RunFolderError]) -> tuple[Completion, ...]:
    remedy = "Give the probe.json of a run with the same tokenizer, or unset diagnostics.probe"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        version, tokenizer_hash = value["version"], value["tokenizer_hash"]
        items = tuple(_item(index, fields) for index, fields in enumerate(value["items"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise error_class("the probe set cannot be read", got=f"{path}: {error}", remedy=remedy) from None
    if version != PROBE_VERSION or not items:
        raise error_class("the probe set is of another version, or empty", got=f"{path}: {version}", remedy=remedy)
    if tokenizer_hash != tokenizer.tokenizer_hash:
        raise error_class(
            "the probe set belongs to another tokenizer",
            got=f"{path}: {tokenizer_hash}",
            expected=tokenizer.tokenizer_hash,
            remedy=remedy,
        )
    return items


def _item(index: int, fields: dict[str, Any]) -> Completion:
    prompt = Prompt(
        id=fields["prompt_id"],
        question=fields["question"],
        answer=fields["reference"],
        text=fields["prompt"],
        token_ids=tuple(fields["prompt_token_ids"]),
    )
    count = len(fields["token_ids"])
    return Completion(
        prompt=prompt,
        sample_key=index,
        token_ids=tuple(fields["token_ids"]),
        text=fields["answer"],
        # Contexts, not samples to learn from: their own log-probs are never used.
        behavior_logprobs=(0.0,) * count,
        sampler_logprobs=(0.0,) * count,
        stop_reason=fields["stop_reason"],
    )

"""Sampling outside a training run: ``qerl rollout``.

Noise is off unless ``eval.noise`` or a sigma of one's own says otherwise; then it is the one under which ``qerl eval`` measures the policy, first
draw, and the records hold it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from qerl.config.load import dump_config
from qerl.env_info import collect_env
from qerl.errors import ConfigError
from qerl.metrics.behavior import behavior_rows
from qerl.metrics.files import check_writable
from qerl.metrics.run_dir import RunDir
from qerl.model.aqn import Noise
from qerl.model.checkpoint import adapter_hash, base_hash, norm_hash
from qerl.records import Completion, Group, PolicyState, Rollout, SamplingSpec
from qerl.reward.compose import Rewarder
from qerl.rollout.engine import ProgressCallback
from qerl.train.noise.deployed import NoiseRequest, check_noise, drawn
from qerl.train.prompts import SOURCES, load_prompts
from qerl.train.run import run_facts
from qerl.train.session import Session
from qerl.train.target import Target, open_target
from qerl.train.warnings import preemption_warning

SAMPLING_STREAM = "standalone"
"""Random stream of ``qerl rollout``; training and evaluation have their own."""


def sample_target(
    target: Target,
    *,
    samples: int | None,
    limit: int | None,
    out: Path,
    sigma: float | None = None,
    warn: Callable[[str], None],
    on_progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Sample answers to each prompt of ``data.train``, score them, and write the behavior records.

    Args:
        target: what to sample from.
        samples: answers per prompt; None takes ``rollout.group_size``.
        limit: only the first prompts.
        sigma: level of noise, in the unit of ``aqn.magnitude``; None: no noise, or with ``eval.noise`` the run's own level at this checkpoint.
        out: folder to write; it gets ``config.resolved.yaml``, ``env.json`` and ``rollouts/rollout-000000.parquet``.
        warn: told what the user should know.
        on_progress: passed to the engine.

    Returns:
        ``path`` of the parquet file, ``answers``, ``accuracy`` (None when nothing was scorable), ``noise`` (in words), and the engine's counters.

    Raises:
        ConfigError: there is no data, or noise is asked for where there is none.
        RunFolderError: ``out`` already holds a run.
        OutputError: ``out`` cannot be written; checked first.
    """
    config = target.config
    if config.data.train is None:
        raise ConfigError("there is no data to answer", expected=SOURCES, remedy="Add --data")
    run = RunDir(out)
    check_writable(out, folder=True)
    run.refuse_a_run(remedy="Choose another --out, or delete the folder")
    request = NoiseRequest(draws=1, sigma=sigma) if sigma is not None or config.eval.noise else None
    if request is not None:
        check_noise(config, [target], request, asked="eval.noise=true without --sigma", remedy="--sigma 0.01")
    samples = samples or config.rollout.group_size
    session = open_target(target)
    prompts, _, notes = load_prompts(config, session.tokenizer, config.data.train, "train", limit)
    sampling = SamplingSpec(
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
        min_p=config.rollout.min_p,
        max_new_tokens=config.rollout.max_new_tokens,
        seed=config.train.seed,
        stream=SAMPLING_STREAM,
    )
    noise = next(drawn(config, session, target, request, warn, group_size=samples), None)
    completions, stats = session.engine.generate(
        prompts, sampling, group_size=samples, noise=noise, on_progress=on_progress
    )
    with Rewarder(config.reward, config.rollout.max_new_tokens) as rewarder:
        scores = rewarder.score(completions)
        crowded = preemption_warning(stats["preemptions"], len(completions))
        for text in [*target.notes, *notes, *rewarder.take_warnings(), *filter(None, [crowded])]:
            warn(text)
    weights_hash = base_hash(session.model)
    rollout = _record(target, session, sampling, samples, completions, stats, weights_hash, noise)
    groups = [
        Group(prompt=prompt, completions=completions[i : i + samples], scores=tuple(scores[i : i + samples]))
        for i, prompt in zip(range(0, len(completions), samples), prompts, strict=True)
    ]
    run = RunDir.create(out)
    path = run.write_rollout_parquet(
        0, behavior_rows(rollout, groups, [False] * len(groups)), run_facts=run_facts(session, weights_hash)
    )
    run.write_json(run.env_path, collect_env())
    run.write_text(run.config_path, dump_config(session.config))
    scorable = [score.outcome.value for score in scores if score.reward is not None]
    accuracy = scorable.count("correct") / len(scorable) if scorable else None
    words = "none" if noise is None else f"scope {noise.state.scope}, sigma {noise.state.sigma:g}"
    return {**stats, "path": path, "answers": len(completions), "accuracy": accuracy, "noise": words}


def _record(
    target: Target,
    session: Session,
    sampling: SamplingSpec,
    samples: int,
    completions: tuple[Completion, ...],
    stats: dict[str, float],
    weights_hash: str,
    noise: Noise | None,
) -> Rollout:
    """The answers with the identity of the policy they came from."""
    policy = PolicyState(
        policy_version=target.updates,
        adapter_hash=adapter_hash(session.model),
        norm_hash=norm_hash(session.model),
        base_format=target.config.quant.storage(target.config.quant.format),
        base_hash=weights_hash,
        noise=None if noise is None else noise.state,
    )
    return Rollout(
        index=0,
        group_size=samples,
        completions=completions,
        sampling=sampling,
        policy=policy,
        engine=session.engine.name,
        kernels=session.kernels,
        cache_state="empty",
        stats=stats,
    )

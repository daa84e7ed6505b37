"""Measuring policies outside a training run: several suites, several checkpoints, clean and noisy, under one protocol.

The model is loaded once; checkpoints are copied into it one after the other, the base first. Every policy answers the same
prompts with the same random numbers, so differences are paired by question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from qerl.config.schema import Config
from qerl.errors import ConfigError, RunFolderError
from qerl.eval.compare import Comparison, compare_stored
from qerl.eval.evaluate import evaluate
from qerl.eval.files import Measurement, suite_names
from qerl.eval.noise import NoiseSpread, noise_spread, stored
from qerl.metrics.run_dir import RunDir
from qerl.model.aqn import Noise
from qerl.model.attention import PackedSequences
from qerl.model.checkpoint import load_adapter
from qerl.records import Prompt
from qerl.reward.compose import Rewarder
from qerl.rollout.engine import ProgressCallback
from qerl.train.noise.deployed import NoiseRequest, check_noise, drawn
from qerl.train.prompts import SOURCES, load_prompts
from qerl.train.session import Session, open_session
from qerl.train.target import Target, resolve_target

BASE = "base"
EFFECT_TOKENS = 64
"""Tokens of the first prompt at which the effect of an adapter is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterEffect:
    """What the adapter (with its norms) changes, at the tokens of one prompt."""

    policy: str
    max_logit_change: float
    mean_kl: float
    """Mean over tokens of KL(base, adapted), nats."""

    @property
    def dead(self) -> bool:
        """Not one logit differs from the base's."""
        return self.max_logit_change == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Everything that one call measured."""

    measurements: tuple[Measurement, ...]
    effects: tuple[AdapterEffect, ...]
    spreads: tuple[NoiseSpread, ...]
    comparisons: tuple[Comparison, ...]
    """Each clean policy against the first one of its suite."""

    def facts(self) -> dict[str, Any]:
        """What ``evaluation.json`` says besides the measurements."""
        return {
            "adapter_effects": [asdict(effect) for effect in self.effects],
            "noise": [spread.to_dict() for spread in self.spreads],
        }


def choose_targets(
    target: str,
    settings: Sequence[str] = (),
    *,
    config_file: str | None = None,
    checkpoints: str | None = None,
    adapter: Path | None = None,
    base: bool = False,
) -> list[tuple[str, Target]]:
    """The policies to measure, by name, the base first.

    Args:
        target: run folder, configuration file, model folder or name.
        settings: ``key=value`` overrides.
        config_file: configuration for a model target.
        checkpoints: steps of a run's checkpoints, ``50,100``, or ``all``; None takes the newest.
        adapter: PEFT folder to load on a model or configuration target.
        base: the base without adapter; with ``checkpoints`` too, both.

    Raises:
        ConfigError: options that do not go together.
        RunFolderError: the run has no such checkpoint.
        CheckpointError: there is no such model.
    """
    resolve = partial(resolve_target, target, settings, config_file=config_file, adapter=adapter)
    found = [(BASE, resolve(base=True))] if base else []
    if checkpoints is None and not base:
        newest = RunDir(target).latest_checkpoint() or adapter
        found.append((BASE if newest is None else newest.name, resolve()))
    found += [(f"checkpoint-{step}", resolve(checkpoint=step)) for step in _steps(target, checkpoints)]
    return found


def _steps(target: str, checkpoints: str | None) -> list[int]:
    if checkpoints is None:
        return []
    if checkpoints == "all":
        steps = [step for step, _ in RunDir(target).checkpoints()]
        if not steps:
            raise RunFolderError(
                "the run has no checkpoint", got=target, remedy="Use --base to take the base model without adapter"
            )
        return steps
    parts = [part.strip() for part in checkpoints.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ConfigError("--checkpoint is not understood", got=checkpoints, expected="a step, steps as 50,100, or all")
    return list(dict.fromkeys(int(part) for part in parts))


def measure(
    targets: Sequence[tuple[str, Target]],
    suites: Sequence[str],
    *,
    noise: NoiseRequest | None,
    warn: Callable[[str], None],
    on_progress: ProgressCallback | None = None,
    on_measured: Callable[[Measurement], None] | None = None,
) -> Deployment:
    """Measure every policy on every suite.

    Args:
        targets: what ``choose_targets`` gave.
        suites: names or paths of data sets; empty takes ``data.eval``.
        noise: also measure each policy with noise.
        warn: told what the user should know.
        on_progress: passed to the engine.
        on_measured: called with each measurement as it is made.

    Raises:
        ConfigError: there is no evaluation data, data sets cannot be told apart by name, or noise is asked for where there is none.
    """
    config = targets[0][1].config
    names = tuple(suites) or ((config.data.eval,) if config.data.eval is not None else ())
    if not names:
        raise ConfigError("there is no evaluation data", expected=f"a suite, {SOURCES}", remedy="Add --data")
    called = suite_names(names)
    if len(set(called.values())) < len(called):
        raise ConfigError(
            "two data sets of one evaluation have one name", got=", ".join(called), remedy="Name each of them once"
        )
    if noise is not None:
        check_noise(
            config,
            [target for _, target in targets],
            noise,
            asked="--noise or eval.noise=true, without --sigma",
            remedy="--noise 1 --sigma 0.01",
        )
    for text in dict.fromkeys(note for _, target in targets for note in target.notes):
        warn(text)
    models = _Models(adapted=any(target.adapter is not None for _, target in targets))
    prompts: dict[str, list[Prompt]] = {}
    measurements: list[Measurement] = []
    effects: list[AdapterEffect] = []
    spreads: list[NoiseSpread] = []
    max_new_tokens = config.eval.max_new_tokens or config.rollout.max_new_tokens
    with Rewarder(config.reward, max_new_tokens) as rewarder:

        def answer(session: Session, suite: str, policy: str, draw: Noise | None) -> Measurement:
            result = evaluate(
                session.engine,
                prompts[suite],
                rewarder,
                eval_cfg=config.eval,
                seed=config.train.seed,
                max_new_tokens=max_new_tokens,
                noise=draw,
                adapters=models.adapted,
                on_progress=on_progress,
            )
            for text in rewarder.take_warnings():
                warn(text)
            measurements.append(Measurement(suite=called[suite], policy=policy, location=suite, result=result))
            if on_measured is not None:
                on_measured(measurements[-1])
            return measurements[-1]

        for policy, target in targets:
            session = models.session(target)
            if session.device.type == "cuda":
                rewarder.warm_up()
            prompts = prompts or {name: _prompts(config, session, name, warn) for name in names}
            if target.adapter is not None:
                effects.append(adapter_effect(session, prompts[names[0]][0], policy))
                if effects[-1].dead:
                    warn(f"{policy} changes no logit of the base: its adapter is empty, or is not applied")
            draws = list(drawn(config, session, target, noise, warn, group_size=config.eval.samples))
            for suite in names:
                clean = answer(session, suite, policy, None)
                noisy = [
                    (draw.state.to_dict(), answer(session, suite, f"{policy}, noise draw {index}", draw))
                    for index, draw in enumerate(draws)
                ]
                if noisy:
                    spreads.append(noise_spread(clean, noisy))
    return Deployment(
        measurements=tuple(measurements),
        effects=tuple(effects),
        spreads=tuple(spreads),
        comparisons=tuple(_against_first(measurements, [name for name, _ in targets], config)),
    )


class _Models:
    """The one model in memory: adapters are copied into it, another folder (a checkpoint of full mode) takes its place."""

    def __init__(self, *, adapted: bool):
        self.adapted = adapted
        self._session: Session | None = None

    def session(self, target: Target) -> Session:
        """The session with ``target`` loaded. The base has to come before any adapter."""
        path = target.config.model.path
        if self._session is None or self._session.config.model.path != path:
            self._session = None
            self._session = open_session(target.config, trainable=self.adapted, keep_reference_norms=self.adapted)
        if target.adapter is not None:
            load_adapter(self._session.model, target.adapter)
        return self._session


@torch.no_grad()
def adapter_effect(session: Session, prompt: Prompt, policy: str) -> AdapterEffect:
    """Logits with the adapter and norms in use against those of the base, at the tokens of one prompt."""
    model = session.model
    tokens_T = torch.tensor(prompt.token_ids[:EFFECT_TOKENS], device=model.device)
    context = PackedSequences(torch.tensor([0, tokens_T.numel()], device=model.device))
    adapted_TV = model.logits(model(tokens_T, context)).double()
    base_TV = model.logits(model(tokens_T, context, adapters=False, reference=True)).double()
    base_logp_TV, logp_TV = base_TV.log_softmax(-1), adapted_TV.log_softmax(-1)
    kl_T = (base_logp_TV.exp() * (base_logp_TV - logp_TV)).sum(-1)
    return AdapterEffect(
        policy=policy,
        max_logit_change=float((adapted_TV - base_TV).abs().max()),
        mean_kl=float(kl_T.mean()),
    )


def _prompts(config: Config, session: Session, source: str, warn: Callable[[str], None]) -> list[Prompt]:
    prompts, _, notes = load_prompts(config, session.tokenizer, source, "test", config.data.eval_limit)
    for text in notes:
        warn(text)
    return prompts


def _against_first(
    measurements: Sequence[Measurement], policies: Sequence[str], config: Config
) -> Iterator[Comparison]:
    """Each further clean policy against the first, suite by suite."""
    for suite in dict.fromkeys(measurement.suite for measurement in measurements):
        clean = [m for m in measurements if m.suite == suite and m.policy in policies]
        for measurement in clean[1:]:
            yield compare_stored(
                stored(clean[0]), stored(measurement), confidence=config.eval.confidence, seed=config.train.seed
            )

"""The sampling temperature at which one model has the entropy of another: an arm that tells noise from mere randomness.

Both entropies are of softmax(logits / T) over the full vocabulary, averaged over the tokens of one fixed probe set, before
any training. Under noise it is E_z[H(O|z)], the mean over draws of the entropy under each: what a rollout samples from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qerl.config.schema import Config
from qerl.errors import ConfigError
from qerl.experiments.schema import MatchConfig
from qerl.experiments.shared import only_maker_of_probe
from qerl.metrics.run_dir import RunDir
from qerl.model.aqn import Noise
from qerl.records import TrainBatch
from qerl.train.diagnostics.entropy import entropy
from qerl.train.diagnostics.passes import answer_hidden, logit_chunks, pack_answers
from qerl.train.diagnostics.probe import cut, open_probe
from qerl.train.fit import within_budget
from qerl.train.noise.director import NoiseDirector
from qerl.train.prompts import load_prompts
from qerl.train.session import Session, open_session

MATCH_STREAM = "match_noise"
MOST_STEPS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """A temperature that was found."""

    temperature: float
    entropy: float
    """At that temperature, nats a token."""
    target: float
    """The entropy that was asked for."""
    at_own: float
    """The model's entropy at the temperature it had before."""
    steps: int
    """Entropies that were computed."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def match_temperature(
    entropy_at: Callable[[float], float], target: float, *, own: float, match: MatchConfig
) -> Matched:
    """Bisect the temperature; the entropy of a softmax never falls with it.

    Args:
        entropy_at: temperature -> entropy.
        target: entropy to reach.
        own: temperature that the arm had.
        match: range and tolerance.

    Raises:
        ConfigError: the target lies outside what the range reaches.
    """
    low, high = match.low, match.high
    at_own, at_low, at_high = entropy_at(own), entropy_at(low), entropy_at(high)
    if not at_low <= target <= at_high:
        raise ConfigError(
            "no temperature in range has the wanted entropy",
            got=f"{target:.4g} nats, against {at_low:.4g} at {low:g} and {at_high:.4g} at {high:g}",
            remedy="Widen match_temperature.low and match_temperature.high",
        )
    steps, middle, value = 3, own, at_own
    while abs(value - target) > match.tolerance * max(target, 1e-12) and steps < MOST_STEPS:
        middle = (low + high) / 2
        value = entropy_at(middle)
        steps += 1
        low, high = (middle, high) if value < target else (low, middle)
    return Matched(temperature=middle, entropy=value, target=target, at_own=at_own, steps=steps)


def initial_entropy(config: Config, out: RunDir, *, draws: int) -> float:
    """Entropy of an arm before training, at its own temperature, under the noise of its first noisy stage if it has any.

    Args:
        config: configuration of one of the arm's cells.
        out: holds the probe set (``probe.json``), which is made from this arm's base model if there is none.
        draws: noise draws that are averaged over.

    Raises:
        ConfigError: noise that accumulates, which has no size before training.
    """
    if config.aqn.enabled and config.aqn.mode == "accumulate":
        raise ConfigError("noise that accumulates has no initial entropy to match", got="aqn.mode=accumulate")
    with _probe(config, out) as (session, batches):
        noises = _first_draws(config, session, draws)
        values = [
            _entropy(session, [answer_hidden(session.model, b, noise) for b in batches], config.rollout.temperature)
            for noise in noises
        ]
    return sum(values) / len(values)


def find_temperature(config: Config, out: RunDir, target: float, match: MatchConfig) -> Matched:
    """The temperature at which an arm without noise has the entropy ``target`` on the probe set.

    Raises:
        ConfigError: the arm has noise of its own, or no temperature in range reaches the target.
    """
    if config.aqn.enabled:
        raise ConfigError(
            "match_temperature is for an arm whose only source of randomness is its temperature",
            got="aqn.enabled=true",
            remedy="Set aqn.enabled: false for that arm",
        )
    with _probe(config, out) as (session, batches), torch.no_grad():
        hidden = [answer_hidden(session.model, batch, None) for batch in batches]
        return match_temperature(
            lambda temperature: _entropy(session, hidden, temperature),
            target,
            own=config.rollout.temperature,
            match=match,
        )


@contextmanager
def _probe(config: Config, out: RunDir) -> Iterator[tuple[Session, list[TrainBatch]]]:
    """The model before training and the packed probe set; without gradients."""
    with within_budget(config), torch.no_grad():
        session = open_session(config)
        source, split = (config.data.eval, "test") if config.data.eval is not None else (config.data.train, "train")
        prompts, _, _ = load_prompts(config, session.tokenizer, source, split, config.diagnostics.probe_prompts)
        with only_maker_of_probe(out.path, lambda text: None):
            probe = open_probe(config, out, session, prompts)
        size, most = config.rollout.group_size, config.diagnostics.probe_tokens
        items = [replace(cut(item, most), sample_key=size * i) for i, item in enumerate(probe)]
        yield session, pack_answers(items, config.pass_tokens, session.device)


def _first_draws(config: Config, session: Session, draws: int) -> list[Noise | None]:
    """Draws of the first noisy stage; one None when there is no noise."""
    if not config.aqn.enabled:
        return [None]
    prompts, _, _ = load_prompts(
        config, session.tokenizer, config.data.train, "train", config.aqn.calibration.prompts, training=True
    )
    first = -(-config.planned_updates // config.aqn.num_stages)
    state, _ = NoiseDirector(config, session, prompts).begin(rollout=0, completed=first)
    if state is None or state.silent:
        return [None]
    drawn = replace(state, stream=MATCH_STREAM)
    return [replace(drawn, rollout=draw).materialize(session.model) for draw in range(draws)]


def _entropy(session: Session, hidden: Sequence[Tensor], temperature: float) -> float:
    """Mean entropy of softmax(logits / temperature) over all answer tokens, nats, of hidden states [N, D] a batch."""
    parts = [
        entropy(torch.log_softmax(logits_CV / temperature, dim=-1))
        for hidden_ND in hidden
        for (logits_CV,) in logit_chunks(session.model, [hidden_ND])
    ]
    return float(torch.cat(parts).mean())

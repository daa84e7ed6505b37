"""The noise that a policy is deployed with outside training, as its run would have had it next: for `qerl eval` and `qerl rollout`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from qerl.config.schema import Config
from qerl.errors import ConfigError
from qerl.model.aqn import Noise
from qerl.records import Prompt
from qerl.train.noise.director import NoiseDirector, load_sum, needs_calibration
from qerl.train.prompts import load_prompts
from qerl.train.resume import TrainState, read_state
from qerl.train.session import Session
from qerl.train.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseRequest:
    """A noisy deployment to measure beside the clean one.

    Attributes:
        draws: how many keys; each is one policy.
        sigma: level instead of the run's own at the checkpoint, in the unit of ``aqn.magnitude``.
    """

    draws: int
    sigma: float | None = None


def has_noise(config: Config, target: Target, request: NoiseRequest) -> bool:
    """Whether this policy was trained with noise, or is given a level."""
    return request.sigma is not None or (config.aqn.enabled and target.updates > 0)


def check_noise(config: Config, targets: Sequence[Target], request: NoiseRequest, *, asked: str, remedy: str) -> None:
    """Refuse a request that no policy could meet, before a model is loaded.

    Args:
        config: of the policies.
        targets: the policies.
        request: what is to be drawn.
        asked: the words that asked for it.
        remedy: those that would give a level.

    Raises:
        ConfigError: no policy has noise, one has noise that only training can measure, or the level is not finite.
    """
    if request.sigma is not None and not math.isfinite(request.sigma):
        expected = "a finite number, such as 0.01"
        raise ConfigError("--sigma is no level of noise", got=f"{request.sigma:g}", expected=expected)
    if not any(has_noise(config, target, request) for target in targets):
        raise ConfigError(
            "there is no noise: no policy here was trained with any",
            got=asked,
            remedy=f"Give the level: {remedy}" + ("" if not config.eval.noise else ", or set eval.noise=false"),
        )
    bare = any(target.updates == 0 and has_noise(config, target, request) for target in targets)
    if config.aqn.magnitude == "sensitivity" and bare:
        raise ConfigError(
            "noise by sensitivity is measured while a run trains",
            got="aqn.magnitude=sensitivity for a policy without adapter",
            remedy="Add aqn.magnitude=relative",
        )


def drawn(
    config: Config,
    session: Session,
    target: Target,
    request: NoiseRequest | None,
    warn: Callable[[str], None],
    *,
    group_size: int,
) -> Iterator[Noise]:
    """The noise of each draw for ``group_size`` answers a prompt; none for a base policy without a sigma of its own."""
    if request is None or not has_noise(config, target, request):
        return
    noisy = config.model_copy(update={"aqn": config.aqn.model_copy(update={"enabled": True})})
    folder = target.adapter or Path(target.config.model.path or "")
    known = (folder / "trainer_state.json").is_file()
    state = read_state(folder) if known else TrainState()
    total = load_sum(folder, noisy, session) if known else {}
    prompts: list[Prompt] = []
    if needs_calibration(config.aqn) and config.data.train is not None:
        prompts = load_prompts(config, session.tokenizer, config.data.train, "train", None)[0]
    director = NoiseDirector(noisy, session, prompts, state.noise, total)
    for index in range(request.draws):
        draw = director.deployment(
            step=state.step, completed=state.updates, draw=index, sigma=request.sigma, group_size=group_size
        )
        if draw is None:
            warn(f"the noise of {target.description} has sigma 0 here; --sigma gives another level")
            return
        yield draw
    for text in director.take_warnings():
        warn(text)

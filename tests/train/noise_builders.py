"""A tiny session with a configuration, for tests of a run's noise."""

from __future__ import annotations

from rollout_builders import load_tiny, make_prompts

from qerl.config.load import load_config
from qerl.model.tokenizer import load_tokenizer
from qerl.rollout.engine import Engine
from qerl.train.session import Session

BASE = (
    "model.dtype=float32",
    "rollout.max_new_tokens=12",
    "rollout.group_size=4",
    "rollout.prompts_per_step=2",
    "rollout.max_prompt_tokens=16",
    "train.steps=10",
    "train.token_budget=64",
    "aqn.num_stages=5",
    "aqn.calibration.prompts=4",
)
PROMPTS = tuple(make_prompts((5, 9, 3, 12, 7)))


def make_config(*settings):
    return load_config(None, [*BASE, *settings])


def make_session(folder, config):
    model, tokenizer = load_tiny(folder), load_tokenizer(folder)
    return Session(
        config=config,
        model_path=folder,
        model=model,
        tokenizer=tokenizer,
        engine=Engine(model, tokenizer),
        device=model.device,
    )

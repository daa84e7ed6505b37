"""From the name of a data set to rendered prompts: the one way for training, evaluation, rollouts and checks."""

from __future__ import annotations

from qerl.config.schema import Config
from qerl.data.prompts import build_prompts
from qerl.data.tasks import load_rows
from qerl.model.tokenizer import Tokenizer
from qerl.records import Prompt

SOURCES = "a file, the built-in `arithmetic` or `calculations`, a NAME under $QERL_DATA, or a hub name"
"""What a data set can be named by, for messages."""


def load_prompts(
    config: Config, tokenizer: Tokenizer, source: str | None, split: str, limit: int | None, *, training: bool = False
) -> tuple[list[Prompt], int, list[str]]:
    """Rendered prompts of a data set, how many were too long, and what there is to warn of (of ``training`` on them too)."""
    assert source is not None
    loaded = load_rows(source, default_split=split)
    rows = loaded.rows[:limit] if limit else loaded.rows
    prompts, dropped = build_prompts(rows, tokenizer, config.data, config.rollout.max_prompt_tokens)
    notes = list(loaded.warnings) if training else []
    if dropped.too_long:
        notes.append(
            f"{dropped.too_long} of {len(rows)} prompts of {source} are longer than "
            f"rollout.max_prompt_tokens={config.rollout.max_prompt_tokens} and were left out"
        )
    return prompts, dropped.too_long, notes

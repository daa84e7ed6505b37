"""From rows to tokenized prompts, and the order in which training draws them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qerl.config.schema import DataConfig
from qerl.errors import CheckpointError, ConfigError, DataError, nearest
from qerl.kernels.philox import permutation
from qerl.model.tokenizer import Tokenizer
from qerl.records import Prompt

ORDER_STREAM = "data_order"
PLACEHOLDER = "{question}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedCount:
    """What became of the rows: ``kept + too_long`` is their number; ``longest`` is in tokens, dropped ones included."""

    kept: int
    too_long: int
    longest: int


def build_prompts(
    rows: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, data: DataConfig, max_prompt_tokens: int
) -> tuple[list[Prompt], DroppedCount]:
    """Render every row with the chat template and tokenize it; prompts that are too long are left out and counted.

    A question is a string, which ``data.prompt_template`` wraps as the user message, or a list of chat messages, whose
    last user message the template wraps. ``data.system_prompt`` is put first unless the messages have a system message.

    Raises:
        DataError: a row lacks a field or holds one that cannot be used (named by file and line), or every prompt is
            too long.
        CheckpointError: the chat template hides the question: different questions give the same tokens.
        ConfigError: the template has no place for the question.
    """
    if PLACEHOLDER not in data.prompt_template:
        raise ConfigError(
            "data.prompt_template has no place for the question",
            got=repr(data.prompt_template),
            expected=f"a text that contains {PLACEHOLDER}",
        )
    prompts: list[Prompt] = []
    longest = 0
    seen = _Distinct()
    for index, row in enumerate(rows):
        place = getattr(row, "place", f"row {index + 1}")
        prompt = _build(row, place, tokenizer, data)
        seen.add(prompt.token_ids, row[data.question_key], place)
        longest = max(longest, len(prompt.token_ids))
        if len(prompt.token_ids) <= max_prompt_tokens:
            prompts.append(prompt)
    if seen.questions == 1:
        # Nothing to compare with: the same row is rendered with a question that is longer by a word.
        longer = _build(
            {**rows[0], data.question_key: _one_more_word(rows[0][data.question_key])}, place, tokenizer, data
        )
        seen.add(longer.token_ids, longer.question, "the same with a word more")
    dropped = DroppedCount(kept=len(prompts), too_long=len(rows) - len(prompts), longest=longest)
    if not prompts:
        raise DataError(
            f"no prompt is left: {dropped.too_long} of {len(rows)} are longer than rollout.max_prompt_tokens",
            got=f"max_prompt_tokens={max_prompt_tokens}, longest prompt {longest} tokens",
            remedy="Raise rollout.max_prompt_tokens, or use data with shorter questions",
        )
    return prompts, dropped


class _Distinct:
    """Which question gave which tokens, to find a chat template that leaves the question out."""

    def __init__(self) -> None:
        self._by_tokens: dict[tuple[int, ...], tuple[str, str]] = {}
        self._folded: set[str] = set()

    @property
    def questions(self) -> int:
        """Different questions so far; spaces and capitals do not count, for a template may trim them."""
        return len(self._folded)

    def add(self, token_ids: tuple[int, ...], question: Any, place: str) -> None:
        text = question if isinstance(question, str) else " ".join(message["content"] for message in question)
        folded = " ".join(text.split()).casefold()
        self._folded.add(folded)
        other, first = self._by_tokens.setdefault(token_ids, (folded, place))
        if other != folded:
            raise CheckpointError(
                "the chat template hides the question: different questions give the same prompt",
                got=f"equal tokens for {first} and {place}",
                expected="a template that shows the user's message",
                remedy="Mend the chat_template of the model folder, or take the checkpoint's own",
            )


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """16 hex digits of the SHA-256 of all ids, tokens and answers, in order: what a model is asked, and what is right."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(f"{prompt.id!r} {prompt.token_ids} {prompt.answer!r}\n".encode())
    return digest.hexdigest()[:16]


class PromptSampler:
    """Draws prompts without end: a keyed permutation each epoch, none repeated or left out within one.

    Args:
        prompts: at least one.
        seed: root seed; the order is f(seed, epoch) alone.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int):
        assert prompts, "no prompts"
        self.prompts = tuple(prompts)
        self.seed = seed
        self.epoch = 0
        self.position = 0
        self._order = self._permutation(0)

    @property
    def epochs(self) -> float:
        """Passes over the prompts drawn so far."""
        return self.epoch + self.position / len(self.prompts)

    def next(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts; may run on into following epochs."""
        drawn: list[Prompt] = []
        while len(drawn) < count:
            if self.position == len(self.prompts):
                self.epoch += 1
                self.position = 0
                self._order = self._permutation(self.epoch)
            taken = self._order[self.position : self.position + count - len(drawn)]
            drawn += [self.prompts[index] for index in taken]
            self.position += len(taken)
        return drawn

    def state_dict(self) -> dict[str, Any]:
        """The cursor, as plain values for JSON, with what identifies the data and the order."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "count": len(self.prompts),
            "prompts": fingerprint(self.prompts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where ``state_dict`` was taken.

        Raises:
            DataError: the prompts or the seed are not the same, so that the order would be another one.
        """
        expected = self.state_dict()
        for key, what in (
            ("seed", "train.seed"),
            ("count", "the number of prompts"),
            ("prompts", "the prompts (ids, tokens or answers)"),
        ):
            if state[key] != expected[key]:
                raise DataError(
                    f"the data order cannot be resumed: {what} changed",
                    got=expected[key],
                    expected=f"{state[key]}, as in the checkpoint",
                    remedy="Resume with the same data, tokenizer, chat template and settings, or start a new run",
                )
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._permutation(self.epoch)

    def _permutation(self, epoch: int) -> list[int]:
        return permutation(self.seed, ORDER_STREAM, len(self.prompts), c1=epoch).tolist()


def _build(row: Mapping[str, Any], place: str, tokenizer: Tokenizer, data: DataConfig) -> Prompt:
    messages = _messages(_field(row, data.question_key, "data.question_key", place), place, data)
    answer = _field(row, data.answer_key, "data.answer_key", place)
    endless = isinstance(answer, float) and not math.isfinite(answer)
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or endless:
        raise DataError(
            f"{place}: the answer in field {data.answer_key!r} is not text or a number",
            got=f"{answer!r:.80}",
            expected="the final answer as a string",
        )
    if not str(answer).strip():
        raise DataError(f"{place}: the answer in field {data.answer_key!r} is empty", expected="the final answer")
    text = tokenizer.render(messages, add_generation_prompt=True)
    return Prompt(
        # Without its folder, so that moving the data does not rename the prompts.
        id=str(row.get("id", place.rpartition("/")[2])),
        question=_question_text(row[data.question_key]),
        answer=str(answer),
        text=text,
        token_ids=tuple(tokenizer.encode(text)),
        row=dict(row),
    )


def _one_more_word(question: Any) -> Any:
    if isinstance(question, str):
        return f"{question} Why?"
    return [*question[:-1], {**question[-1], "content": f"{question[-1]['content']} Why?"}]


def _field(row: Mapping[str, Any], key: str, setting: str, place: str) -> Any:
    if key in row:
        return row[key]
    close = nearest(key, row)
    raise DataError(
        f"{place}: the row has no field {key!r}",
        got=f"fields {', '.join(row) or '(none)'}",
        remedy=f"Set {setting}={close}" if close else f"Set {setting} to the field that holds it",
    )


def _messages(question: Any, place: str, data: DataConfig) -> list[dict[str, Any]]:
    """The chat, system message first where there is one."""
    if isinstance(question, str):
        messages = [{"role": "user", "content": question}]
    else:
        messages = _checked_messages(question, place)
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    content = "" if last is None else messages[last]["content"]
    if not content.strip():
        raise DataError(
            f"{place}: the question is empty", got=f"{question!r:.80}", expected="a text that asks something"
        )
    messages[last or 0]["content"] = data.prompt_template.replace(PLACEHOLDER, content)
    if data.system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": data.system_prompt})
    return messages


def _checked_messages(question: Any, place: str) -> list[dict[str, Any]]:
    valid = isinstance(question, list) and all(
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in question
    )
    if not valid:
        raise DataError(
            f"{place}: the question is neither text nor chat messages",
            got=f"{question!r:.80}",
            expected='a string, or a list of {"role": ..., "content": ...}',
        )
    return [{"role": message["role"], "content": message["content"]} for message in question]


def _question_text(question: Any) -> str:
    """For people: the question, or the last user message."""
    if isinstance(question, str):
        return question
    return next(message["content"] for message in reversed(question) if message["role"] == "user")

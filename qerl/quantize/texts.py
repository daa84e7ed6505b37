"""Text for calibration and for comparing models, as token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from qerl.data.tasks import load_rows
from qerl.errors import ConfigError, DataError
from qerl.model.tokenizer import Tokenizer

FIELDS = ("question", "solution")
"""Fields of a row whose texts, joined by a newline, are its text; those that are absent or null are left out."""
ROLLOUT_FIELDS = ("prompt_token_ids", "token_ids")
"""Fields of a behavior record: prompt and answer as token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequence:
    """Token ids of which the later part is scored."""

    ids: tuple[int, ...]
    first: int = 1
    """Index of the first scored token; at least 1, since the first token has nothing before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Sequences and what they were made of."""

    sequences: tuple[TokenSequence, ...]
    record: dict[str, Any]
    """Source, counts, preprocessing and a hash of the token ids."""


def calibration_text(
    name: str, tokenizer: Tokenizer, *, count: int, length: int, fields: Sequence[str] = FIELDS
) -> Text:
    """`count` sequences of exactly `length` tokens: the rows' texts end to end, an end-of-sequence token after each.

    Args:
        name: a data set as `qerl.data.tasks.load_rows` takes it (default split: train).
        tokenizer: of the model that is quantized.
        count, length: how much.
        fields: see `FIELDS`.

    Raises:
        DataError: there is no such data, a row has none of the fields, or the text is too short.
    """
    data = load_rows(name, default_split="train")
    ids: list[int] = []
    used = 0
    for text in _texts(data.rows, fields):
        if len(ids) >= count * length:
            break
        ids += [*tokenizer.encode(text), tokenizer.eos_ids[0]]
        used += 1
    if len(ids) < count * length:
        raise DataError(
            f"the calibration text {name} is too short",
            got=f"{len(ids)} tokens = {len(ids) // length} sequences of {length}",
            expected=f"{count} sequences",
            remedy=f"Use --calibration-count {len(ids) // length}, or more text."
            if len(ids) >= length
            else "Use a smaller --calibration-length, or more text.",
        )
    sequences = tuple(TokenSequence(ids=tuple(ids[i * length : (i + 1) * length])) for i in range(count))
    record = {
        "source": name,
        "location": data.location,
        "split": data.split,
        "rows": used,
        "count": count,
        "length": length,
        "preprocessing": f"{' + newline + '.join(fields)} of each row in file order, no chat template, an end-of-sequence "
        "token after each, packed end to end and cut into sequences",
    }
    return Text(sequences=sequences, record=record | {"sha256": _hash(sequences)})


def report_text(
    name: str,
    tokenizer: Tokenizer,
    *,
    count: int,
    length: int,
    fields: Sequence[str] = FIELDS,
) -> Text:
    """The first `count` rows of a data set, one sequence a row, cut to `length` tokens.

    A row of a rollout's behavior records is its prompt and answer as they were, and only the answer is scored; of any other row the
    text is taken, and all of it is scored.

    Raises:
        DataError: there is no such data, or a row has none of the fields.
    """
    data = load_rows(name, default_split="test")
    rows = data.rows[:count]
    answers = all(field in data.rows[0] for field in ROLLOUT_FIELDS)
    if answers:
        sequences = [_rollout_sequence(row, length) for row in rows]
    else:
        sequences = [TokenSequence(ids=tuple(tokenizer.encode(text)[:length])) for text in _texts(rows, fields)]
    usable = tuple(sequence for sequence in sequences if len(sequence.ids) > sequence.first)
    if not usable:
        raise DataError(
            f"nothing in {name} can be scored", got=f"{len(rows)} rows", expected="at least two tokens in one"
        )
    record = {
        "source": name,
        "location": data.location,
        "split": data.split,
        "count": len(usable),
        "length": length,
        "scored": "answers of a rollout" if answers else "all tokens but the first of " + " + newline + ".join(fields),
        "sha256": _hash(usable),
    }
    return Text(sequences=usable, record=record)


def split_fields(text: str) -> tuple[str, ...]:
    """`question,solution` as fields.

    Raises:
        ConfigError: there is none.
    """
    fields = tuple(part.strip() for part in text.split(",") if part.strip())
    if not fields:
        raise ConfigError(
            "no text field is named", got=repr(text), expected="names of fields, such as question,solution"
        )
    return fields


def _texts(rows: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> Iterator[str]:
    for row in rows:
        parts = [row[field] for field in fields if isinstance(row.get(field), str) and row[field]]
        if not parts:
            raise DataError(
                f"{getattr(row, 'place', 'a row')} has no text",
                got=f"fields {', '.join(row)}",
                expected=f"a text in one of {', '.join(fields)}",
                remedy="Name the fields that hold the text: --text-fields.",
            )
        yield "\n".join(parts)


def _rollout_sequence(row: Mapping[str, Any], length: int) -> TokenSequence:
    prompt, answer = (tuple(row[field]) for field in ROLLOUT_FIELDS)
    return TokenSequence(ids=(prompt + answer)[:length], first=max(1, len(prompt)))


def _hash(sequences: Sequence[TokenSequence]) -> str:
    digest = hashlib.sha256()
    for sequence in sequences:
        digest.update(numpy.asarray([len(sequence.ids), sequence.first, *sequence.ids], dtype="<i8").tobytes())
    return digest.hexdigest()

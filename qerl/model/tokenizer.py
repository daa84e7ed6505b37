"""The checkpoint's own tokenizer and chat template, and every token that ends an answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.errors import CheckpointError
from qerl.model.spec import read_json_object, token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
"""Files of which one must be there, the preferred one first."""


class Tokenizer:
    """A Hugging Face tokenizer behind the few calls that the pipeline makes.

    Attributes:
        eos_ids: ids that end an answer: the union of those in ``generation_config.json``, ``config.json`` and the
            tokenizer, in that order.
        pad_id: id for unused slots of a batch; the tokenizer's own, else the first EOS id.
        tokenizer_hash: 16 hex digits of the SHA-256 of the vocabulary and its rules.
        template_hash: the same of the chat template.
    """

    def __init__(self, inner: PreTrainedTokenizerBase, eos_ids: tuple[int, ...], template: str):
        self.inner = inner
        self.eos_ids = eos_ids
        self.pad_id: int = inner.pad_token_id if inner.pad_token_id is not None else eos_ids[0]
        self.tokenizer_hash = _short_hash(_vocabulary(inner))
        self.template_hash = _short_hash(template)

    def __len__(self) -> int:
        return len(self.inner)

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text`` as it stands: nothing is added, since a rendered chat carries its own markers."""
        return self.inner.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` without special tokens."""
        return self.inner.decode(list(ids), skip_special_tokens=True)

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The chat as one string, by the model's own template.

        Raises:
            CheckpointError: the template refuses the messages (a system message, say, where it allows none).
        """
        from jinja2.exceptions import TemplateError

        try:
            return self.inner.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except TemplateError as error:
            raise CheckpointError(
                "the chat template refuses these messages",
                got=f"roles {[message.get('role') for message in messages]}: {error}",
                remedy="Unset data.system_prompt if the template allows no system message.",
            ) from None


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint folder; nothing is fetched from elsewhere.

    Raises:
        CheckpointError: tokenizer files are missing or broken, there is no chat template, or no EOS id is known.
    """
    folder = Path(path)
    config = read_json_object(folder, "config.json")
    inner = _load_files(folder)
    if not inner.chat_template:
        raise CheckpointError(
            f"the tokenizer in {folder} has no chat template",
            expected="chat_template.jinja, or chat_template in tokenizer_config.json",
            remedy="Use the instruct checkpoint, or put the template that the model was trained with into the folder.",
        )
    eos_ids = _eos_ids(folder, config, inner)
    if not eos_ids:
        raise CheckpointError(
            f"{folder} names no end-of-sequence token, so no answer would ever stop",
            expected="eos_token_id in generation_config.json or config.json",
        )
    return Tokenizer(inner, eos_ids, str(inner.chat_template))


def _load_files(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    files = [name for name in TOKENIZER_FILES if (folder / name).exists()]
    if not files:
        # Without this check transformers makes up an empty tokenizer for some architectures.
        raise CheckpointError(
            f"{folder} holds no tokenizer",
            expected=f"one of {', '.join(TOKENIZER_FILES)}",
            remedy="Copy all tokenizer files of the checkpoint into the folder.",
        )
    # tokenizer.json is the whole tokenizer. AutoTokenizer may rebuild it from the vocabulary by the rules of the
    # architecture, which drops splitting rules that differ from the architecture's usual ones.
    loader = PreTrainedTokenizerFast if files[0] == "tokenizer.json" else AutoTokenizer
    try:
        return loader.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # noqa: BLE001 (the tokenizers library raises bare Exception for a broken file)
        raise CheckpointError(
            f"the tokenizer in {folder} cannot be loaded",
            got=(str(error).strip().splitlines() or [type(error).__name__])[0],
            expected=f"{files[0]} and tokenizer_config.json as the model's authors published them",
            remedy="Copy all tokenizer files of the checkpoint into the folder.",
        ) from None


def _eos_ids(folder: Path, config: Mapping[str, Any], inner: PreTrainedTokenizerBase) -> tuple[int, ...]:
    generation: Mapping[str, Any] = {}
    if (folder / "generation_config.json").exists():
        generation = read_json_object(folder, "generation_config.json")
    found = (
        (generation.get("eos_token_id"), folder / "generation_config.json"),
        (config.get("eos_token_id"), folder / "config.json"),
        (inner.eos_token_id, folder / "tokenizer_config.json"),
    )
    return tuple(dict.fromkeys(i for value, source in found for i in token_ids(value, str(source))))


def _vocabulary(inner: PreTrainedTokenizerBase) -> str:
    backend = getattr(inner, "backend_tokenizer", None)
    if backend is not None:
        return backend.to_str()
    return json.dumps(inner.get_vocab(), sort_keys=True)


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]

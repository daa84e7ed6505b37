"""One answer under generation: where it stands in the call, and the tokens it has so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """One answer to be generated."""

    index: int
    """Place in the result: prompt * group_size + answer."""
    prompt_index: int
    prompt_length: int
    """Tokens."""
    sample_key: int
    """Key of its random numbers, unique within the rollout."""
    prefix_key: int = 0
    """Sequences of one prompt with the same number share the prompt's keys and values; noise may set them apart."""
    limit: int | None = None
    """Most tokens of its answer; that of the sampling settings when not given."""
    answered: int = 0
    """Tokens of the answer that are known when it starts: 0, unless it lost its row to others and starts again."""

    @property
    def known_length(self) -> int:
        """Tokens that are known when it starts."""
        return self.prompt_length + self.answered

    @property
    def prefix(self) -> tuple[int, int, int]:
        """What identifies the keys and values of the tokens that are known; those of an answer are its own."""
        return self.prompt_index, self.prefix_key, self.index + 1 if self.answered else 0


@dataclass(frozen=True, slots=True)
class Answer:
    """The tokens of one sequence with their log-probs."""

    token_ids: list[int]
    behavior_logprobs: list[float]
    sampler_logprobs: list[float]

"""Tokens that a pass over the vocabulary chooses beside what it measures: the arg-max, and a draw. Legend: N tokens, V vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class TokenChoices(NamedTuple):
    """What `token_choices` returns, all [N]; numbers are float32 (float64 for float64 input), tokens int64."""

    logprobs_N: Tensor
    """Of the targets."""
    entropy_N: Tensor
    """In nats."""
    top_N: Tensor
    """Token of the largest logit, the lowest of equals."""
    top_logprobs_N: Tensor
    drawn_N: Tensor | None
    """Token that is drawn at the uniform number; None where none is given."""
    drawn_logprobs_N: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Where a pass leaves the tokens that it chooses; all [N], without gradient. They are valid tokens whatever the logits are."""

    top_N: Tensor
    top_logprobs_N: Tensor
    uniform_N: Tensor | None = None
    """float32, in (0, 1)."""
    drawn_N: Tensor | None = None
    drawn_logprobs_N: Tensor | None = None

    @classmethod
    def of(cls, tokens: int, uniform_N: Tensor | None, dtype: torch.dtype, device: torch.device) -> Wanted:
        """Room for a pass over so many tokens."""

        def room() -> tuple[Tensor, Tensor]:
            return (
                torch.zeros(tokens, dtype=torch.int64, device=device),
                torch.empty(tokens, dtype=dtype, device=device),
            )

        top_N, top_logprobs_N = room()
        drawn_N, drawn_logprobs_N = (None, None) if uniform_N is None else room()
        return cls(
            top_N=top_N,
            top_logprobs_N=top_logprobs_N,
            uniform_N=uniform_N,
            drawn_N=drawn_N,
            drawn_logprobs_N=drawn_logprobs_N,
        )

    def part(self, rows: slice) -> Wanted:
        """Views of some of the tokens."""

        def view(value_N: Tensor | None) -> Tensor | None:
            return None if value_N is None else value_N[rows]

        return Wanted(
            top_N=self.top_N[rows],
            top_logprobs_N=self.top_logprobs_N[rows],
            uniform_N=view(self.uniform_N),
            drawn_N=view(self.drawn_N),
            drawn_logprobs_N=view(self.drawn_logprobs_N),
        )

"""Packing: scored groups become micro-batches of sequences laid end to end, without padding.

Legend: T packed tokens, N answer tokens, S sequences.

A mini-batch (one optimizer update) is a list of whole groups; it is cut into micro-batches of at most ``token_budget``
tokens. The loss of a mini-batch does not depend on the cut: divisors are computed over the mini-batch (``loss.py``).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from qerl.records import Completion, Group, Outcome, TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answer ready for packing."""

    completion: Completion
    advantage: float
    in_loss: bool

    @property
    def num_tokens(self) -> int:
        return len(self.completion.prompt.token_ids) + len(self.completion.token_ids)


def make_samples(
    groups: Sequence[Group], advantages: Sequence[Sequence[float]], *, mask_truncated: bool
) -> list[list[Sample]]:
    """Samples by group. Unscorable answers, and truncated ones when masked, stay out of the loss."""
    return [
        [
            Sample(
                completion=completion,
                advantage=advantage,
                in_loss=score.outcome is not Outcome.UNSCORABLE
                and not (mask_truncated and completion.stop_reason == "length"),
            )
            for completion, score, advantage in zip(group.completions, group.scores, values, strict=True)
        ]
        for group, values in zip(groups, advantages, strict=True)
    ]


def split_minibatches(samples: Sequence[Sequence[Sample]], count: int) -> list[list[Sample]]:
    """``count`` mini-batches of whole groups, in order; sizes differ by at most one group."""
    bounds = [len(samples) * i // count for i in range(count + 1)]
    return [[sample for group in samples[a:b] for sample in group] for a, b in pairwise(bounds)]


def pack(samples: Sequence[Sample], token_budget: int, device: torch.device) -> Iterator[TrainBatch]:
    """Micro-batches of at most ``token_budget`` tokens, samples in order.

    A sample longer than the budget makes a micro-batch of its own (the config refuses budgets that allow this).
    """
    chunk: list[Sample] = []
    tokens = 0
    for sample in samples:
        if chunk and tokens + sample.num_tokens > token_budget:
            yield _pack_one(chunk, device)
            chunk, tokens = [], 0
        chunk.append(sample)
        tokens += sample.num_tokens
    if chunk:
        yield _pack_one(chunk, device)


def _pack_one(samples: Sequence[Sample], device: torch.device) -> TrainBatch:
    tokens: list[int] = []
    positions: list[int] = []
    cu_seqlens = [0]
    predictor: list[int] = []
    targets: list[int] = []
    sequence: list[int] = []
    behavior: list[float] = []
    for index, sample in enumerate(samples):
        prompt, answer = sample.completion.prompt.token_ids, sample.completion.token_ids
        start = len(tokens)
        tokens.extend(prompt)
        tokens.extend(answer)
        positions.extend(range(len(prompt) + len(answer)))
        first = start + len(prompt) - 1
        predictor.extend(range(first, first + len(answer)))
        targets.extend(answer)
        sequence.extend([index] * len(answer))
        behavior.extend(sample.completion.behavior_logprobs)
        cu_seqlens.append(len(tokens))

    def integers(values: Sequence[int]) -> torch.Tensor:
        # Through an array: torch looks at every number of a list several times.
        return torch.frombuffer(array("q", values), dtype=torch.int64).to(device)

    return TrainBatch(
        tokens_T=integers(tokens),
        positions_T=integers(positions),
        cu_seqlens_S1=integers(cu_seqlens),
        predictor_N=integers(predictor),
        targets_N=integers(targets),
        sequence_N=integers(sequence),
        answer_lengths_S=integers([len(s.completion.token_ids) for s in samples]),
        behavior_logprobs_N=torch.frombuffer(array("f", behavior), dtype=torch.float32).to(device),
        advantages_S=torch.tensor([s.advantage for s in samples], dtype=torch.float32, device=device),
        loss_mask_S=torch.tensor([s.in_loss for s in samples], dtype=torch.bool, device=device),
        sample_keys_S=integers([s.completion.sample_key for s in samples]),
    )

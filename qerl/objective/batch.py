"""Packing: scored groups become micro-batches of samples laid end to end, without padding.

Legend: T packed tokens, N answer tokens, S samples.

A mini-batch (one optimizer update) is a list of whole groups; it is cut into micro-batches of at most ``token_budget``
tokens. The loss of a mini-batch does not depend on the cut: divisors are computed over the mini-batch (``loss.py``). Answers to one
prompt may share its tokens: those stand once, and each answer is a piece of its own that goes on from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch

from qerl.kernels.attention import KeySpans, Repeats
from qerl.model.attention import SharedPrompts
from qerl.records import Completion, Group, Outcome, TrainBatch

Integers: TypeAlias = np.ndarray[Any, Any]
"""int64, or bool."""


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


def pack(
    samples: Sequence[Sample],
    token_budget: int,
    device: torch.device,
    *,
    prefix_key: Callable[[int], int] | None = None,
) -> Iterator[TrainBatch]:
    """Micro-batches of at most ``token_budget`` tokens, samples in order.

    A sample longer than the budget makes a micro-batch of its own (the config refuses budgets that allow this).

    Args:
        prefix_key: neighbors with equal prompts whose sample keys it gives the same number share the prompt's tokens: what noise
            sees of them must be the same (``Noise.prefix_key``). None: every sample has its own.
    """
    chunk: list[Sample] = []
    tokens = 0
    for sample in samples:
        goes_on = bool(chunk) and prefix_key is not None and _same_prefix(chunk[-1], sample, prefix_key)
        cost = len(sample.completion.token_ids) if goes_on else sample.num_tokens
        if chunk and tokens + cost > token_budget:
            yield _pack_one(chunk, device, prefix_key)
            chunk, tokens, cost = [], 0, sample.num_tokens
        chunk.append(sample)
        tokens += cost
    if chunk:
        yield _pack_one(chunk, device, prefix_key)


def _same_prefix(first: Sample, second: Sample, prefix_key: Callable[[int], int]) -> bool:
    one, other = first.completion, second.completion
    return one.prompt.token_ids == other.prompt.token_ids and prefix_key(one.sample_key) == prefix_key(other.sample_key)


class _Layout:
    """Where tokens, pieces and keys of a pack stand, in stretches. Legend: T tokens, U keys, P pieces."""

    def __init__(self) -> None:
        self.tokens: list[Integers] = []
        self.positions: list[Integers] = []
        self.sequence: list[Integers] = []
        """Of each token."""
        self.source: list[Integers] = []
        """Token whose key stands at each place."""
        self.own: list[Integers] = []
        """Place of each token's key in its own piece."""
        self.pieces = [0]
        self.keys = [0]
        """Where the keys of each piece begin."""
        self.shared: list[tuple[int, int, list[int]]] = []
        """First token of a shared prompt, its tokens, and the places where copies of its keys begin."""

    def add(self, tokens: Integers, first_position: int, index: int, prompt: slice | None = None) -> int:
        """A piece of sample ``index``, which may go on from a prompt that stands already; returns its first token."""
        start, count, place = self.pieces[-1], len(tokens), self.keys[-1]
        self.tokens.append(tokens)
        self.positions.append(_range(first_position, count))
        self.pieces.append(start + count)
        self.sequence.append(np.full(count, index))
        if prompt is not None:
            self.shared[-1][2].append(place)
            self.source.append(_range(prompt.start, prompt.stop - prompt.start))
            place += prompt.stop - prompt.start
        self.own.append(_range(place, count))
        self.source.append(_range(start, count))
        self.keys.append(place + count)
        return start


def _range(start: int, count: int) -> Integers:
    return np.arange(start, start + count, dtype=np.int64)


def _pack_one(samples: Sequence[Sample], device: torch.device, prefix_key: Callable[[int], int] | None) -> TrainBatch:
    layout = _Layout()
    predictor, targets, sequence = [], [], []
    index = 0
    for run in _runs(samples, prefix_key):
        prompt = np.array(run[0].completion.prompt.token_ids, dtype=np.int64)
        if len(run) > 1:
            first = layout.add(prompt, 0, index)
            layout.shared.append((first, len(prompt), []))
        for sample in run:
            answer = np.array(sample.completion.token_ids, dtype=np.int64)
            if len(run) > 1:
                start = layout.add(answer, len(prompt), index, slice(first, first + len(prompt)))
                predictor.append(np.array([first + len(prompt) - 1]))
                predictor.append(_range(start, len(answer) - 1))
            else:
                start = layout.add(np.concatenate((prompt, answer)), 0, index) + len(prompt) - 1
                predictor.append(_range(start, len(answer)))
            targets.append(answer)
            sequence.append(np.full(len(answer), index))
            index += 1

    def integers(values: Sequence[int]) -> torch.Tensor:
        return torch.from_numpy(np.array(values, dtype=np.int64)).to(device)

    def joined(parts: Sequence[Integers]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device)

    behavior = np.concatenate([np.array(s.completion.behavior_logprobs, dtype=np.float32) for s in samples])
    return TrainBatch(
        tokens_T=joined(layout.tokens),
        positions_T=joined(layout.positions),
        cu_pieces_P1=integers(layout.pieces),
        predictor_N=joined(predictor),
        targets_N=joined(targets),
        sequence_N=joined(sequence),
        prompt_lengths_S=integers([len(s.completion.prompt.token_ids) for s in samples]),
        answer_lengths_S=integers([len(s.completion.token_ids) for s in samples]),
        behavior_logprobs_N=torch.from_numpy(behavior).to(device),
        advantages_S=torch.tensor([s.advantage for s in samples], dtype=torch.float32, device=device),
        loss_mask_S=torch.tensor([s.in_loss for s in samples], dtype=torch.bool, device=device),
        sample_keys_S=integers([s.completion.sample_key for s in samples]),
        shared=_shared(layout, joined, integers) if layout.shared else None,
    )


def _runs(samples: Sequence[Sample], prefix_key: Callable[[int], int] | None) -> list[list[Sample]]:
    """Neighbors that share a prompt, together."""
    runs: list[list[Sample]] = []
    for sample in samples:
        if runs and prefix_key is not None and _same_prefix(runs[-1][-1], sample, prefix_key):
            runs[-1].append(sample)
        else:
            runs.append([sample])
    return runs


def _shared(
    layout: _Layout,
    joined: Callable[[Sequence[Integers]], torch.Tensor],
    integers: Callable[[Sequence[int]], torch.Tensor],
) -> SharedPrompts:
    most = max(len(places) for _, _, places in layout.shared)
    prompt, copies, real = [], [], []
    for first, count, places in layout.shared:
        prompt.append(_range(first, count))
        filled = np.array(places + [0] * (most - len(places)))
        copies.append(filled + np.arange(count)[:, None])
        real.append(np.broadcast_to(np.arange(most) < len(places), (count, most)))
    return SharedPrompts(
        sequence_T=joined(layout.sequence),
        repeats=Repeats(
            source_U=joined(layout.source),
            own_T=joined(layout.own),
            prompt_R=joined(prompt),
            copies_RC=joined(copies),
            real_RC=joined(real),
        ),
        # In the type that attention's kernel takes, or each layer would convert it.
        keys=KeySpans(cu_keys_S1=integers(layout.keys).int(), lengths=tuple(b - a for a, b in pairwise(layout.keys))),
    )

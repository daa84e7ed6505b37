"""Packing: scored groups become micro-batches of samples laid end to end, without padding.

Legend: T packed tokens, N answer tokens, S samples.

A mini-batch (one optimizer update) is a list of whole groups; it is cut into micro-batches of at most ``token_budget``
tokens. The loss of a mini-batch does not depend on the cut: divisors are computed over the mini-batch (``loss.py``). Answers to one
prompt may share its tokens: those stand once, and each answer is a piece of its own that goes on from them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from qerl.kernels.attention import KeySpans, Repeats
from qerl.model.attention import SharedPrompts
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
    """Where tokens, pieces and keys of a pack stand. Legend: T tokens, U keys, P pieces."""

    def __init__(self) -> None:
        self.tokens = array("q")
        self.positions = array("q")
        self.pieces = array("q", [0])
        self.sequence = array("q")
        """Of each token."""
        self.source = array("q")
        """Token whose key stands at each place."""
        self.own = array("q")
        """Place of each token's key in its own piece."""
        self.keys = array("q", [0])
        """Where the keys of each piece begin."""
        self.shared: list[tuple[int, int, list[int]]] = []
        """First token of a shared prompt, its tokens, and the places where copies of its keys begin."""

    def add(self, tokens: Sequence[int], first_position: int, index: int, prompt: slice | None = None) -> int:
        """A piece of sample ``index``, which may go on from a prompt that stands already; returns its first token."""
        start, count = len(self.tokens), len(tokens)
        self.tokens.extend(tokens)
        self.positions.extend(range(first_position, first_position + count))
        self.pieces.append(start + count)
        self.sequence.extend([index] * count)
        if prompt is not None:
            self.shared[-1][2].append(len(self.source))
            self.source.extend(range(prompt.start, prompt.stop))
        self.own.extend(range(len(self.source), len(self.source) + count))
        self.source.extend(range(start, start + count))
        self.keys.append(len(self.source))
        return start


def _pack_one(samples: Sequence[Sample], device: torch.device, prefix_key: Callable[[int], int] | None) -> TrainBatch:
    layout = _Layout()
    predictor, targets, sequence, behavior = array("q"), array("q"), array("q"), array("f")
    index = 0
    for run in _runs(samples, prefix_key):
        prompt = run[0].completion.prompt.token_ids
        if len(run) > 1:
            first = layout.add(prompt, 0, index)
            layout.shared.append((first, len(prompt), []))
        for sample in run:
            answer = sample.completion.token_ids
            if len(run) > 1:
                start = layout.add(answer, len(prompt), index, slice(first, first + len(prompt)))
                predictor.append(first + len(prompt) - 1)
                predictor.extend(range(start, start + len(answer) - 1))
            else:
                start = layout.add(prompt + answer, 0, index) + len(prompt) - 1
                predictor.extend(range(start, start + len(answer)))
            targets.extend(answer)
            sequence.extend([index] * len(answer))
            behavior.extend(sample.completion.behavior_logprobs)
            index += 1

    def integers(values: array[int] | Sequence[int]) -> torch.Tensor:
        # From an array: torch looks at every number of a list several times.
        values = values if isinstance(values, array) else array("q", values)
        return torch.frombuffer(values, dtype=torch.int64).to(device)

    return TrainBatch(
        tokens_T=integers(layout.tokens),
        positions_T=integers(layout.positions),
        cu_pieces_P1=integers(layout.pieces),
        predictor_N=integers(predictor),
        targets_N=integers(targets),
        sequence_N=integers(sequence),
        prompt_lengths_S=integers([len(s.completion.prompt.token_ids) for s in samples]),
        answer_lengths_S=integers([len(s.completion.token_ids) for s in samples]),
        behavior_logprobs_N=torch.frombuffer(behavior, dtype=torch.float32).to(device),
        advantages_S=torch.tensor([s.advantage for s in samples], dtype=torch.float32, device=device),
        loss_mask_S=torch.tensor([s.in_loss for s in samples], dtype=torch.bool, device=device),
        sample_keys_S=integers([s.completion.sample_key for s in samples]),
        shared=_shared(layout, integers) if layout.shared else None,
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


def _shared(layout: _Layout, integers: Callable[[array[int] | Sequence[int]], torch.Tensor]) -> SharedPrompts:
    most = max(len(places) for _, _, places in layout.shared)
    prompt, copies, real = array("q"), array("q"), array("q")
    for first, count, places in layout.shared:
        prompt.extend(range(first, first + count))
        filled = places + [0] * (most - len(places))
        for offset in range(count):
            copies.extend([place + offset for place in filled])
            real.extend([1] * len(places) + [0] * (most - len(places)))
    keys = tuple(stop - start for start, stop in pairwise(layout.keys))
    return SharedPrompts(
        sequence_T=integers(layout.sequence),
        repeats=Repeats(
            source_U=integers(layout.source),
            own_T=integers(layout.own),
            prompt_R=integers(prompt),
            copies_RC=integers(copies).view(-1, most),
            real_RC=integers(real).view(-1, most).bool(),
        ),
        keys=KeySpans(cu_keys_S1=integers(layout.keys), lengths=keys),
    )

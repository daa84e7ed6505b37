"""Forward passes without gradient over packed answers, for measurements.

Shape legend: N answer tokens, S answers, V vocabulary, D hidden size, M noise draws, C answer tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from qerl.kernels.token_logprobs import TokenChoices, token_choices, token_logprobs
from qerl.model.aqn import Noise
from qerl.model.attention import PackedSequences
from qerl.model.decoder import Decoder
from qerl.objective.batch import Sample, pack
from qerl.records import Completion, SamplingSpec, TrainBatch
from qerl.rollout.sampler import answer_uniforms

CHUNK_ELEMENTS = 1 << 24
"""Most logits held at once, over all draws: 64 MiB of float32 (and a few times that in work space)."""


def pack_answers(completions: Sequence[Completion], token_budget: int, device: torch.device) -> list[TrainBatch]:
    """Answers packed as the trainer packs them."""
    samples = [Sample(completion=completion, advantage=0.0, in_loss=True) for completion in completions]
    return list(pack(samples, token_budget, device))


def answer_hidden(
    model: Decoder,
    batch: TrainBatch,
    noise: Noise | None,
    *,
    adapters: bool = True,
    context: PackedSequences | None = None,
) -> Tensor:
    """Hidden states [N, D] that predict the answer tokens of a batch; ``context`` is the batch's, where it has been made already."""
    context = batch.context() if context is None else context
    return model(batch.tokens_T, context, noise=noise, adapters=adapters)[batch.predictor_N]


def answer_logprobs(
    model: Decoder,
    batch: TrainBatch,
    temperature: float,
    noise: Noise | None,
    *,
    adapters: bool = True,
    context: PackedSequences | None = None,
) -> Tensor:
    """Log-prob of every answer token under softmax(logits / temperature), float32 [N]; ``context`` as above."""
    hidden_ND = answer_hidden(model, batch, noise, adapters=adapters, context=context)
    return token_logprobs(hidden_ND, model.head_weight, batch.targets_N, temperature=temperature)[0]


def answer_choices(model: Decoder, batch: TrainBatch, sampling: SamplingSpec, noise: Noise | None) -> TokenChoices:
    """Log-probs as of `answer_logprobs` at the sampler's temperature, and the tokens that these logits draw at the numbers at which the
    engine drew the answers, without truncations."""
    starts_S = batch.answer_lengths_S.cumsum(0) - batch.answer_lengths_S
    position_N = torch.arange(len(batch.targets_N), device=batch.targets_N.device) - starts_S[batch.sequence_N]
    uniform_N = answer_uniforms(sampling, batch.sample_keys_S[batch.sequence_N], position_N, 1)[:, 0]
    hidden_ND = answer_hidden(model, batch, noise)
    return token_choices(hidden_ND, model.head_weight, batch.targets_N, uniform_N, temperature=sampling.temperature)


def logit_chunks(model: Decoder, hidden_MND: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Logits of several passes over the same tokens, a few tokens at a time: lists of M float32 [C, V]."""
    count = max(1, CHUNK_ELEMENTS // (model.spec.vocab_size * len(hidden_MND)))
    for start in range(0, len(hidden_MND[0]), count):
        yield [model.logits(hidden_ND[start : start + count]) for hidden_ND in hidden_MND]


def sum_by_answer(values_N: Tensor, batch: TrainBatch) -> Tensor:
    """Sum over the tokens of each answer, float64 [S]."""
    sums_S = torch.zeros(batch.num_sequences, dtype=torch.float64, device=values_N.device)
    return sums_S.index_add_(0, batch.sequence_N, values_N.double())

"""The records that stages pass to one another: all of them, and nothing else.

Shape legend: T packed tokens (prompts and answers), N answer tokens, S samples, P pieces of a pack. Every record is frozen; no field is
filled in by a later stage (a later stage makes a record of its own).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from torch import Tensor

from qerl.model.aqn import NoiseState
from qerl.model.attention import PackedSequences, SharedPrompts

StopReason = Literal["stop", "length"]


class Outcome(StrEnum):
    """What became of one answer. Exactly one holds; the first that applies in this order of precedence.

    UNSCORABLE leaves the group statistics. CORRECT is decided by the accuracy function, also for a truncated answer.
    """

    UNSCORABLE = "unscorable"
    CORRECT = "correct"
    TRUNCATED = "truncated"
    UNPARSABLE = "unparsable"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One question, rendered and tokenized."""

    id: str
    question: str
    """The row's question as text, for people."""
    answer: str
    """Reference answer."""
    text: str
    """The rendered chat, as the model sees it."""
    token_ids: tuple[int, ...]
    row: dict[str, Any] = field(default_factory=dict)
    """All fields of the data row, handed to reward functions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSpec:
    """How tokens are chosen. A sample's random numbers are f(seed, stream, rollout, sample key, position) alone."""

    temperature: float = 1.0
    """0 is greedy; log-probs are then those of temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_new_tokens: int = 1024
    seed: int = 0
    stream: str = "sample"
    """Name of the random stream (`kernels.philox`): training and evaluation never share one."""
    rollout: int = 0
    """Rollout index: part of the counter."""

    @property
    def truncated_support(self) -> bool:
        """Whether the sampler can exclude tokens that softmax(logits / T) allows."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled answer with the log-probs of the pass that chose it."""

    prompt: Prompt
    sample_key: int
    """Unique within the rollout: prompt occurrence * group_size + answer."""
    token_ids: tuple[int, ...]
    """Answer tokens, the EOS that ended it included."""
    text: str
    """Decoded answer, special tokens left out."""
    behavior_logprobs: tuple[float, ...]
    """log softmax(logits / T)[token], untruncated, float32; one a token."""
    sampler_logprobs: tuple[float, ...]
    """The same under the truncated sampler (equal when top-p, top-k and min-p are off; 0 when greedy)."""
    stop_reason: StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyState:
    """Everything that identifies the policy a rollout sampled from, apart from the sampler."""

    policy_version: int
    """Completed optimizer updates."""
    adapter_hash: str
    """Hash of the adapters; in full mode of all weights."""
    norm_hash: str
    """Hash of the clean RMSNorm scales."""
    base_format: str
    base_hash: str
    """Hash of the stored (packed) base weights; in full mode of the weights that training began with."""
    noise: NoiseState | None
    """None when noise is off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Answers of one rollout phase, prompt-major: completions[i * group_size + j] is answer j of prompt i."""

    index: int
    group_size: int
    completions: tuple[Completion, ...]
    sampling: SamplingSpec
    policy: PolicyState
    engine: str
    kernels: dict[str, str]
    """Operation -> implementation that ran."""
    cache_state: str
    """What the KV cache held at the start, e.g. `empty`."""
    stats: dict[str, float]
    """Engine counters: generated tokens, prompt tokens, decode steps, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What the reward functions said of one answer."""

    reward: float | None
    """Weighted sum with shaping; None when unscorable."""
    parts: dict[str, float | None]
    """Reward function (and `overlong`) -> unweighted value."""
    outcome: Outcome
    parsed: str | None
    """The answer that was found in the text."""
    note: str | None = None
    """Why it is unscorable (the exception or the time-out)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The answers to one prompt with their scores."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    scores: tuple[Score, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Samples packed end to end, without padding, for one forward and backward pass."""

    tokens_T: Tensor
    """int64 [T]: prompt and answer tokens of all samples; those of a prompt that neighbors share stand once."""
    positions_T: Tensor
    """int64 [T]: position of each token in its own sample."""
    cu_pieces_P1: Tensor
    """int64 [P + 1]: where each piece begins, and T. A piece is a sample, or the prompt that some share, or an answer that goes on
    from one."""
    predictor_N: Tensor
    """int64 [N]: index into T of the position whose logits predict each answer token."""
    targets_N: Tensor
    """int64 [N]: the answer tokens."""
    sequence_N: Tensor
    """int64 [N]: which sample each answer token belongs to, in order."""
    prompt_lengths_S: Tensor
    """int64 [S]: prompt tokens of each sample."""
    answer_lengths_S: Tensor
    """int64 [S]: answer tokens of each sample; at least 1."""
    behavior_logprobs_N: Tensor
    """float32 [N]."""
    advantages_S: Tensor
    """float32 [S]."""
    loss_mask_S: Tensor
    """bool [S]: False for answers that leave the loss (masked truncated, unscorable)."""
    sample_keys_S: Tensor
    """int64 [S]."""
    shared: SharedPrompts | None
    """How answers go on from prompts that they share; None where every piece is a sample."""

    def context(self) -> PackedSequences:
        """How the tokens attend, and whose they are: what a forward pass over the batch needs beside the tokens."""
        return PackedSequences(
            self.cu_pieces_P1,
            self.positions_T,
            sample_keys_S=self.sample_keys_S,
            prompt_lengths_S=self.prompt_lengths_S,
            shared=self.shared,
        )

    @property
    def num_sequences(self) -> int:
        return self.advantages_S.numel()

    @property
    def num_tokens(self) -> int:
        return self.tokens_T.numel()

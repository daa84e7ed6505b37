"""The rollout engine: answers to prompts by continuous batching, in the trainer's process and on its own tensors.

A call prefills each prompt once (all but its last token; once an answer where noise at the prompt differs between answers),
copies the prompt's keys and values to the rows of its answers, and then advances all running rows by one token a step. Tokens are chosen in one place, the decode step: the
first one too, since the step feeds the last prompt token. Rows whose answers end are given to waiting sequences or
closed up, so that a finished sequence costs nothing. There is one host synchronization a step (which rows ended).

Weights, adapters, norms and noise are read where the trainer has them, at every pass: nothing is copied, merged or
cached between calls.

Shape legend: T packed prompt tokens, B running rows, M cache places, V vocabulary, E tokens that end an answer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Items

import numpy as np
import torch
from torch import Tensor

from qerl.errors import ConfigError, DataError, TrainingError
from qerl.model.aqn import Noise
from qerl.model.attention import PackedSequences, SampleRows
from qerl.model.decoder import Decoder
from qerl.model.tokenizer import Tokenizer
from qerl.records import Completion, Prompt, SamplingSpec
from qerl.rollout.kv_cache import DecodeContext, KVCache, PrefillContext
from qerl.rollout.row_noise import RowNoise, decode_noise
from qerl.rollout.sampler import check_sampling, choose
from qerl.rollout.scheduler import Scheduler, Start
from qerl.rollout.sequence import Answer, RowState, Sequence

ProgressCallback = Callable[[int, int, int], None]
"""Called with (answers done, answers in all, tokens generated) whenever answers end."""


class Engine:
    """Generates answers with a model that someone else owns and trains.

    Args:
        model: read at every pass, never written to.
        tokenizer: for the tokens that end an answer and for the text.
        max_num_seqs: most answers decoded at once; more wait.
        max_model_len: longest prompt plus answer, in tokens; the model's own limit when not given.
        prefill_tokens: most prompt tokens of one prefill pass (a longer prompt makes a pass of its own).
        device: where the model is; taken from it when not given.

    Raises:
        ConfigError: a limit below 1, or a max_model_len beyond the model's.
    """

    name = "qerl"

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        *,
        max_num_seqs: int = 256,
        max_model_len: int | None = None,
        prefill_tokens: int = 8192,
        device: torch.device | str | None = None,
    ):
        limit = model.spec.max_positions
        for name, value in (("max_num_seqs", max_num_seqs), ("prefill_tokens", prefill_tokens)):
            if value < 1:
                raise ConfigError(f"engine setting {name} is out of range", got=value, expected="1 or more")
        if max_model_len is not None and not 1 <= max_model_len <= limit:
            raise ConfigError(
                "engine setting max_model_len is out of range",
                got=max_model_len,
                expected=f"1 to {limit}, the model's longest sequence",
            )
        self.model = model
        self.tokenizer = tokenizer
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len or limit
        self.prefill_tokens = prefill_tokens
        self.device = torch.device(device) if device is not None else model.device

    @torch.no_grad()
    def generate(
        self,
        prompts: Items[Prompt],
        sampling: SamplingSpec,
        *,
        group_size: int = 1,
        noise: Noise | None = None,
        adapters: bool = True,
        first_sample_key: int = 0,
        on_progress: ProgressCallback | None = None,
    ) -> tuple[tuple[Completion, ...], dict[str, float]]:
        """Answer every prompt ``group_size`` times.

        Args:
            prompts: may repeat; each occurrence is a group of its own.
            sampling: how tokens are chosen. The random numbers of answer j to prompt i are those of the sample key
                ``first_sample_key + i * group_size + j``, in whatever batch it runs.
            group_size: G.
            noise: perturbation of the norm scales in every pass, or None. Its keys are the sample keys.
            adapters: whether the LoRA adapters take part.
            first_sample_key: key of the first answer; calls of one rollout must not share keys.
            on_progress: called whenever answers end.

        Returns:
            (completions, stats). completions[i * G + j] is answer j to prompt i. Stats are counters:
            ``generated_tokens``, ``prompt_tokens`` (each prompt once), ``prefill_tokens`` (computed before the first decode
            step, all but the last of each prompt), ``decode_steps``, ``refills`` (times that freed
            rows were filled again), ``peak_rows``, ``kv_bytes``, ``prefill_seconds``, ``decode_seconds``, ``seconds``
            (these two, scheduling and text together) and ``tokens_per_second`` (generated, over ``seconds``).

        Raises:
            ConfigError: a sampling setting or the group size is out of range.
            DataError: no prompts, or a prompt that is empty, too long, or not of this model's vocabulary.
            TrainingError: the model gives logits that are not finite.
        """
        check_sampling(sampling)
        if group_size < 1:
            raise ConfigError("the group size is out of range", got=group_size, expected="1 or more")
        self._check_prompts(prompts, sampling)
        began = time.perf_counter()
        sequences = [
            Sequence(
                index=index,
                prompt_index=index // group_size,
                prompt_length=len(prompts[index // group_size].token_ids),
                sample_key=first_sample_key + index,
                prefix_key=0 if noise is None else noise.prefix_key(first_sample_key + index),
            )
            for index in range(len(prompts) * group_size)
        ]
        call = _Call(self, prompts, sequences, sampling, noise, adapters)
        answers = call.run(on_progress)
        completions = tuple(
            self._completion(prompts[sequence.prompt_index], sequence, answer)
            for sequence, answer in zip(sequences, answers, strict=True)
        )
        seconds = time.perf_counter() - began
        stats = {**call.stats, "seconds": seconds, "tokens_per_second": call.stats["generated_tokens"] / seconds}
        return completions, stats

    def _check_prompts(self, prompts: Items[Prompt], sampling: SamplingSpec) -> None:
        if not prompts:
            raise DataError("there are no prompts to answer", expected="at least one")
        vocabulary = self.model.spec.vocab_size
        for prompt in prompts:
            length = len(prompt.token_ids)
            if not length:
                raise DataError(f"prompt {prompt.id} is empty", got="0 tokens", expected="at least 1")
            if length + sampling.max_new_tokens > self.max_model_len:
                raise DataError(
                    f"prompt {prompt.id} is too long",
                    got=f"{length} tokens plus {sampling.max_new_tokens} new ones",
                    expected=f"at most {self.max_model_len} in all, the longest sequence of this model",
                    remedy="Lower rollout.max_prompt_tokens (such prompts are then dropped) or rollout.max_new_tokens.",
                )
            if not 0 <= min(prompt.token_ids) <= max(prompt.token_ids) < vocabulary:
                raise DataError(
                    f"prompt {prompt.id} holds a token that the model does not have",
                    got=f"ids {min(prompt.token_ids)} to {max(prompt.token_ids)}",
                    expected=f"0 to {vocabulary - 1}",
                    remedy="Tokenize it with the tokenizer of this model's folder.",
                )

    def _completion(self, prompt: Prompt, sequence: Sequence, answer: Answer) -> Completion:
        if not math.isfinite(sum(answer.behavior_logprobs)):
            raise TrainingError(
                f"the model's logits are not finite for an answer to prompt {prompt.id}",
                got=f"log-probs {answer.behavior_logprobs[:4]} … of sample {sequence.sample_key}",
                expected="finite numbers",
                remedy="Look at grad_norm and learning_rate of the last steps; go back to an earlier checkpoint.",
            )
        return Completion(
            prompt=prompt,
            sample_key=sequence.sample_key,
            token_ids=tuple(answer.token_ids),
            text=self.tokenizer.decode(answer.token_ids),
            behavior_logprobs=tuple(answer.behavior_logprobs),
            sampler_logprobs=tuple(answer.sampler_logprobs),
            stop_reason="stop" if answer.token_ids[-1] in self.tokenizer.eos_ids else "length",
        )


class _Call:
    """State of one generate call; its cache and row tensors live and die with it."""

    def __init__(
        self,
        engine: Engine,
        prompts: Items[Prompt],
        sequences: list[Sequence],
        sampling: SamplingSpec,
        noise: Noise | None,
        adapters: bool,
    ):
        self.engine, self.prompts, self.sampling = engine, prompts, sampling
        self.adapters = adapters
        self.total = len(sequences)
        rows = min(engine.max_num_seqs, self.total)
        # Clean prompts are computed without noise, not with noise times zero: their keys and values are those of no noise.
        self.prefill_noise = None if noise is not None and noise.state.prompt == "clean" else noise
        self.decode_noise = decode_noise(noise, rows, engine.device)
        self.by_sample = noise is not None and noise.by_sample
        self.scheduler = Scheduler(sequences, rows=rows, prefill_tokens=engine.prefill_tokens)
        self.state = RowState(rows, sampling, engine.device)
        self.eos_E = torch.tensor(engine.tokenizer.eos_ids, device=engine.device)
        spec = engine.model.spec
        self.cache = KVCache(
            layers=spec.num_layers,
            rows=rows,
            # The last token of an answer is never fed back.
            length=max(sequence.prompt_length for sequence in sequences) + sampling.max_new_tokens - 1,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=engine.model.dtype,
            device=engine.device,
        )
        self.offsets = [0] * rows
        """Row -> tokens in its cache, less the steps made so far: what the host knows of ``RowState.length_R``."""
        self.steps = 0
        self.stats = {
            "generated_tokens": 0.0,
            "prompt_tokens": float(sum(len(prompt.token_ids) for prompt in prompts)),
            "prefill_tokens": 0.0,
            "kv_bytes": float(self.cache.nbytes),
            "peak_rows": float(rows),
            "prefill_seconds": 0.0,
            "decode_seconds": 0.0,
        }

    def run(self, on_progress: ProgressCallback | None) -> list[Answer]:
        """Generate everything; answers in the order of the sequences."""
        answers: list[Answer | None] = [None] * self.total
        done = 0
        while not self.scheduler.done:
            self._fill_rows()
            ended = self._decode()
            if not ended:
                continue
            harvested = self.state.harvest(ended)
            for sequence, answer in zip(self.scheduler.release(ended), harvested, strict=True):
                answers[sequence.index] = answer
            done += len(ended)
            self.stats["generated_tokens"] += sum(len(answer.token_ids) for answer in harvested)
            if on_progress is not None:
                on_progress(done, self.total, int(self.stats["generated_tokens"]))
        self.stats["decode_steps"] = float(self.steps)
        self.stats["refills"] = float(self.scheduler.refills)
        return [answer for answer in answers if answer is not None]

    def _fill_rows(self) -> None:
        """Start waiting sequences in free rows, then close the gaps that remain."""
        passes = self.scheduler.admit()
        if passes:
            began = time.perf_counter()
            for starts in passes:
                self._prefill(starts)
            self.stats["prefill_seconds"] += time.perf_counter() - began
        moves = self.scheduler.compact()
        if moves:
            sources, targets = zip(*moves, strict=True)
            for source, target in moves:
                self.offsets[target] = self.offsets[source]
            source_M, target_M = torch.tensor((sources, targets), device=self.engine.device)
            self.cache.copy(source_M, target_M, self.steps + max(self.offsets[row] for row in targets))
            self.state.move(source_M, target_M)
            if isinstance(self.decode_noise, RowNoise):
                self.decode_noise.move(source_M, target_M)

    def _prefill(self, starts: list[Start]) -> None:
        """Bring the prompts of one pass into the cache, and their sequences into rows."""
        spare_1 = torch.tensor([self.cache.spare], device=self.engine.device)
        for start in starts:
            if not start.prefill:
                rows_M = torch.tensor(start.rows, device=self.engine.device)
                self.cache.copy(spare_1, rows_M, start.sequences[0].prompt_length - 1)
        fresh = [start for start in starts if start.prefill_tokens]
        if fresh:
            tokens_T, context = self._pack(fresh)
            self.engine.model(tokens_T, context, noise=self.prefill_noise, adapters=self.adapters)
            self.stats["prefill_tokens"] += len(tokens_T)
        rows = [row for start in starts for row in start.rows]
        sequences = [sequence for start in starts for sequence in start.sequences]
        self.state.start(rows, sequences, [self.prompts[item.prompt_index].token_ids[-1] for item in sequences])
        if isinstance(self.decode_noise, RowNoise):
            self.decode_noise.start(rows, [sequence.sample_key for sequence in sequences])
        for row, sequence in zip(rows, sequences, strict=True):
            self.offsets[row] = sequence.prompt_length - 1 - self.steps

    def _pack(self, fresh: list[Start]) -> tuple[Tensor, PrefillContext]:
        """Tokens of the prompts, all but the last of each, end to end, and where their keys and values go."""
        device, slab = self.engine.device, self.cache.length
        tokens: list[int] = []
        bounds, sources, places = [0], [], []
        for start in fresh:
            tokens.extend(self.prompts[start.sequences[0].prompt_index].token_ids[:-1])
            positions = np.arange(start.prefill_tokens)
            for slot in (*start.rows, self.cache.spare) if start.keep else start.rows:
                sources.append(bounds[-1] + positions)
                places.append(slot * slab + positions)
            bounds.append(len(tokens))
        whose: dict[str, Tensor] = {}
        if self.by_sample:
            heads = [start.sequences[0] for start in fresh]
            whose = {
                "sample_keys_S": torch.tensor([head.sample_key for head in heads], device=device),
                "prompt_lengths_S": torch.tensor([head.prompt_length for head in heads], device=device),
            }
        packed = PackedSequences(torch.tensor(bounds, device=device), **whose)
        source_M, place_M = (torch.from_numpy(np.concatenate(parts)).to(device) for parts in (sources, places))
        return torch.tensor(tokens, device=device), PrefillContext(self.cache, packed, source_M, place_M)

    def _decode(self) -> list[int]:
        """Advance every running row by one token; the rows that ended."""
        began = time.perf_counter()
        state, running = self.state, len(self.scheduler.running)
        samples = None
        if self.by_sample:
            samples = SampleRows(keys_S=state.sample_key_R[:running], prompt_lengths_S=state.prompt_length_R[:running])
        longest = self.steps + max(self.offsets[:running])
        context = DecodeContext(self.cache, state.length_R[:running], longest, samples)
        hidden_BD = self.engine.model(
            state.last_token_R[:running], context, noise=self.decode_noise, adapters=self.adapters
        )
        uniform_B = None if self.sampling.temperature == 0 else state.uniforms(running)
        state.append(choose(self.engine.model.logits(hidden_BD), self.sampling, uniform_B))
        self.steps += 1
        ended = state.finished(running, self.eos_E)
        self.stats["decode_seconds"] += time.perf_counter() - began
        return ended

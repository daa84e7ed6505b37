"""The rollout engine: answers to prompts by continuous batching, in the trainer's process and on its own tensors.

A call prefills each prompt once (all but its last token; once an answer where noise at the prompt differs between answers),
gives the prompt's keys and values to the rows of its answers, and then advances all running rows by one token a step. Tokens are
chosen in one place, the decode step: the first one too, since the step feeds the last prompt token. On CUDA a step is a captured
graph that asks nothing of the host; the host looks every ``window`` steps. Rows whose answers have ended are then given to waiting
sequences or closed up.

Weights, adapters and norms are read where the trainer has them, at every pass: nothing is merged or copied between calls. Graphs and
their memory stay from call to call.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence as Items

import torch

from qerl.config.schema import KvFormat
from qerl.errors import ConfigError, DataError, TrainingError
from qerl.kernels.cached_attention import FP8, members_for
from qerl.kernels.cuda import can_lend, room_in_share
from qerl.memory.pages import SPARE_PAGES, check_pages
from qerl.memory.rows import buckets_for
from qerl.model.aqn import Noise
from qerl.model.decoder import Decoder
from qerl.model.tokenizer import Tokenizer
from qerl.records import Completion, Prompt, SamplingSpec
from qerl.rollout import together
from qerl.rollout.call import Call, ProgressCallback
from qerl.rollout.engine_checks import check_choices, check_counts, check_kv_format
from qerl.rollout.sampler import check_sampling
from qerl.rollout.sequence import Answer, Sequence
from qerl.rollout.workspace import Layout, Workspace

PAGE_TOKENS = 64
"""Tokens a page, where the cache is in small pages."""

CUDA_WINDOW = 8
"""Steps between two looks of the host on CUDA, where the next ones are under way meanwhile. On the CPU the host looks at every step."""

GROWTH = 1.25
"""A kept cache that is too small for all rows is made anew, and steps are captured anew, if that makes it so much larger; else some
sequences wait or are preempted."""

MOST_KEYS = 1 << 32
"""Sample keys there are: each is a word of a counter."""

KV_SHARE = 0.5
"""Most of the memory that a CUDA device has free for the process that keys and values take when no budget is given."""

_BEYOND_FLOAT16 = (
    " q, k or v beyond 65504 are infinite with model.attention_dtype=float16: see whether `compute` has numbers."
)


class Engine:
    """Generates answers with a model that someone else owns and trains.

    Args:
        model: read at every pass, never written to.
        tokenizer: for the tokens that end an answer and for the text.
        max_num_seqs: most answers decoded at once; more wait.
        max_model_len: longest prompt plus answer, in tokens; the model's own limit when not given.
        prefill_tokens: most prompt tokens of one prefill pass. A longer prompt is computed in parts of so many, between which rows that run
            already decode.
        device: where the model is; taken from it when not given.
        window: most steps between two looks of the host; 1 on the CPU and 8 on CUDA when not given. Answers do not depend on it.
        paged: keys and values lie in pages from a common stock, else each row has room for the longest sequence of the call; by
            default on CUDA only.
        expected_tokens: longest sequence that calls will bring, prompt and answer. A paged cache is made for all rows at that length
            at once, where the memory for it suffices, and not again when a later call needs more than the first.
        kv_bytes: most bytes of keys and values, of a paged cache alone. When not given: half of what a CUDA device has free for this process, no bound on the CPU.
        kv_format: `compute`: keys and values in the type of attention; `fp8_values`: values in FP8; `fp8`: both.
        graphs: decode steps are captured; by default on CUDA, and only there.
        lends: `release` gives the memory of keys and values back and keeps the captured steps, which find it where it was; on a CUDA device
            that can.
        static_shapes: an answer has the same bits alone, in any batch and in any order: every step has ``max_num_seqs`` rows, every
            prompt is a pass of its own, or several in parts, nothing is preempted, and the cache is paged. Slower.
        read_together: in a decode step, answers to one prompt read its pages together, where that pays (`qerl.rollout.together`); of a paged cache.

    Raises:
        ConfigError: a limit below 1, a max_model_len beyond the model's, no such kv_format, graphs on the CPU, what needs a paged cache without one, or
            ``read_together`` with ``static_shapes``.
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
        window: int | None = None,
        paged: bool | None = None,
        expected_tokens: int = 0,
        kv_bytes: int | None = None,
        graphs: bool | None = None,
        lends: bool = False,
        static_shapes: bool = False,
        kv_format: KvFormat = "compute",
        read_together: bool = False,
    ):
        self.device = torch.device(device) if device is not None else model.device
        cuda, limit = self.device.type == "cuda", model.spec.max_positions
        self.paged = (cuda or static_shapes) if paged is None else paged
        self.graphs = cuda if graphs is None else graphs
        check_counts(
            {"max_num_seqs": max_num_seqs, "prefill_tokens": prefill_tokens, "window": window, "kv_bytes": kv_bytes},
            expected_tokens=expected_tokens,
            max_model_len=max_model_len,
            limit=limit,
        )
        check_kv_format(kv_format, self.device)
        check_choices(
            paged=self.paged,
            graphs=self.graphs,
            static_shapes=static_shapes,
            read_together=read_together,
            kv_bytes=kv_bytes,
            device=self.device,
        )
        self.model = model
        self.tokenizer = tokenizer
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len or limit
        self.prefill_tokens = self.chunk_tokens = prefill_tokens
        self.window = window or (CUDA_WINDOW if cuda else 1)
        self.ahead = int(cuda)
        """Rounds of steps under way when the host looks at the one before them."""
        self.static_shapes = static_shapes
        self.read_together = read_together
        self._members = members_for(model.spec.num_heads, model.spec.num_kv_heads)
        self.expected_tokens = expected_tokens
        self.kv_dtypes = (
            FP8 if kv_format == "fp8" else model.attention_dtype,
            model.attention_dtype if kv_format == "compute" else FP8,
        )
        """Of keys and of values in the cache."""
        self.kv_bytes = kv_bytes
        self.buckets = buckets_for(max_num_seqs) if self.graphs else None
        """Row counts that a decode step may have; None: as many as run."""
        self.lends = lends and self.graphs and can_lend(self.device)
        if static_shapes:
            self.prefill_tokens, self.buckets = 1, (max_num_seqs,)
        self._workspace: Workspace | None = None

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
        limits: Items[int] | None = None,
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
            limits: most tokens of each answer, one an answer, at most ``sampling.max_new_tokens``; that for all when not given.
            on_progress: called whenever answers end.

        Returns:
            (completions, stats). completions[i * G + j] is answer j to prompt i. Stats are counters:
            ``generated_tokens``, ``prompt_tokens`` (each prompt once), ``prefill_tokens`` (computed before the first decode
            step, all but the last of each prompt, and again what preempted ones had), ``prefill_tokens_again`` (those of them that had been computed
            before), ``prefill_chunks`` (passes over a part of a prompt),
            ``decode_steps``, ``refills`` (times that freed
            rows were filled again), ``preemptions`` (sequences that were put back for want of pages and computed again),
            ``peak_rows``, ``kv_bytes``, ``graph_captures`` and ``graph_seconds`` (first steps of a kind, and their capture),
            ``prefill_seconds``, ``decode_seconds``, ``seconds`` (these two, scheduling and text together) and
            ``tokens_per_second`` (generated, over ``seconds``).

        Raises:
            ConfigError: a sampling setting, the group size or a sample key is out of range, or the keys and values of the longest sequence do not
                fit the memory for them.
            DataError: no prompts, or a prompt that is empty, too long, or not of this model's vocabulary.
            TrainingError: the model gives logits that are not finite.
        """
        check_sampling(sampling)
        if group_size < 1:
            raise ConfigError("the group size is out of range", got=group_size, expected="1 or more")
        if not 0 <= first_sample_key <= MOST_KEYS - len(prompts) * group_size:
            raise ConfigError("a sample key is out of range", got=first_sample_key, expected=f"0 to {MOST_KEYS - 1}")
        self._check_prompts(prompts, sampling)
        if limits is not None and not (
            len(limits) == len(prompts) * group_size and 1 <= min(limits) <= max(limits) <= sampling.max_new_tokens
        ):
            raise ConfigError(
                "the limits of the answers are out of range",
                got=f"{len(limits)} limits from {min(limits, default=0)} to {max(limits, default=0)}",
                expected=f"{len(prompts) * group_size} limits from 1 to {sampling.max_new_tokens}",
            )
        began = time.perf_counter()
        sequences = [
            Sequence(
                index=index,
                prompt_index=index // group_size,
                prompt_length=len(prompts[index // group_size].token_ids),
                sample_key=first_sample_key + index,
                prefix_key=0 if noise is None else noise.prefix_key(first_sample_key + index),
                limit=None if limits is None else limits[index],
            )
            for index in range(len(prompts) * group_size)
        ]
        rows = min(self.max_num_seqs, len(sequences))
        longest_prompt = max(sequence.prompt_length for sequence in sequences)
        workspace = self._workspace_for(rows, longest_prompt, sampling.max_new_tokens)
        if self.static_shapes:
            # As many as have room at their longest: what is preempted would be computed again in other shapes.
            rows = min(rows, workspace.full_rows(longest_prompt + sampling.max_new_tokens - 1))
        call = Call(
            workspace,
            prompts,
            sequences,
            sampling,
            noise,
            adapters,
            rows=rows,
            prefill_tokens=self.prefill_tokens,
            chunk_tokens=self.chunk_tokens,
            eos_ids=self.tokenizer.eos_ids,
            ahead=self.ahead,
            together=self.read_together and together.pays(sequences, self._members, PAGE_TOKENS),
        )
        answers = call.run(on_progress)
        completions = tuple(
            self._completion(prompts[sequence.prompt_index], sequence, answer)
            for sequence, answer in zip(sequences, answers, strict=True)
        )
        seconds = time.perf_counter() - began
        stats = {**call.stats, "seconds": seconds, "tokens_per_second": call.stats["generated_tokens"] / seconds}
        return completions, stats

    def release(self) -> None:
        """Give back the memory of keys and values, and of captured steps where these cannot be kept; `take`, or the next call, has it again."""
        if self._workspace is not None and not self._workspace.cache.give_back():
            self._workspace = None

    def take(self) -> None:
        """Have the memory that `release` gave back again, where captured steps wait for it; else the next call makes it."""
        if self._workspace is not None:
            self._workspace.cache.take()

    def _workspace_for(self, rows: int, prompt: int, answer: int) -> Workspace:
        """Memory for so many rows of at most ``prompt + answer`` tokens: that of the last call, where it is kept and suffices."""
        # The last token of an answer is never fed back.
        longest = prompt + answer - 1
        if not self.paged:
            layout = Layout(
                rows=rows,
                pages=rows + 1,
                page_tokens=longest,
                columns=None,
                window=self.window,
                buckets=None,
                graphs=False,
                kv_dtypes=self.kv_dtypes,
            )
            return Workspace(self.model, self.tokenizer.eos_ids, layout, self.device)
        each = -(-longest // PAGE_TOKENS)
        # All rows at their longest, the prompt of the spare row, and the page that belongs to nobody.
        wanted = rows * each + prompt // PAGE_TOKENS + 3
        kept = self._workspace
        if kept is not None and kept.layout.pages >= wanted:
            kept.cache.take()
            return kept
        most = self._most_pages(kept)
        check_pages(most, longest, page_tokens=PAGE_TOKENS, page_bytes=self._page_bytes())
        pages = min(wanted, most)
        if kept is not None and kept.layout.pages - SPARE_PAGES >= each and pages < GROWTH * kept.layout.pages:
            kept.cache.take()
            return kept
        expected = self.max_num_seqs * -(-self.expected_tokens // PAGE_TOKENS) + 3
        pages = min(max(wanted, expected), most)
        self._workspace = kept = None
        layout = Layout(
            rows=self.buckets[-1] if self.buckets else self.max_num_seqs,
            pages=pages,
            page_tokens=PAGE_TOKENS,
            columns=self.max_model_len // PAGE_TOKENS + 1,
            window=self.window,
            buckets=self.buckets,
            graphs=self.graphs,
            kv_dtypes=self.kv_dtypes,
            lent=self.lends,
            whole_table=self.static_shapes,
        )
        self._workspace = Workspace(self.model, self.tokenizer.eos_ids, layout, self.device)
        return self._workspace

    def _most_pages(self, kept: Workspace | None) -> int:
        """Pages that the memory for keys and values holds."""
        budget = self.kv_bytes
        if budget is None:
            if self.device.type != "cuda":
                return 1 << 31
            unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            held = 0 if kept is None or not kept.cache.there else kept.cache.nbytes
            free = min(torch.cuda.mem_get_info(self.device)[0], max(0, room_in_share(self.device)))
            budget = int(KV_SHARE * (free + unused + held))
        return budget // self._page_bytes()

    def _page_bytes(self) -> int:
        """Bytes of a page: keys and values of all layers."""
        spec = self.model.spec
        return spec.num_layers * PAGE_TOKENS * spec.kv_size * sum(dtype.itemsize for dtype in self.kv_dtypes)

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
                remedy="Look at grad_norm and learning_rate of the last steps; go back to an earlier checkpoint."
                + (_BEYOND_FLOAT16 if self.model.attention_dtype == torch.float16 else ""),
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

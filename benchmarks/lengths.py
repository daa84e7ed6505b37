"""Whole calls of generation, in which answers end at different lengths: imposed ones, or those of a real model."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from benchmarks.synthetic import StubTokenizer
from qerl.config.load import load_config
from qerl.kernels import philox
from qerl.model.decoder import Decoder
from qerl.records import Prompt, SamplingSpec
from qerl.rollout.engine import Engine
from qerl.units import GB

NO_EOS = (10**6,)


def make_prompts(count: int, length: int, vocabulary: int = 150_000) -> list[Prompt]:
    """Prompts of random tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (count, length), generator=generator).tolist()
    return [Prompt(id=str(i), question="", answer="", text="", token_ids=tuple(row)) for i, row in enumerate(ids)]


def realistic(
    model: Decoder, noise: Any, calls: int, *, rows: int, prompt: int | None, chunk: int, kv_gb: float | None
) -> dict[str, Any]:
    """64 prompts x 8 answers of lengths from a log-normal distribution (median 300, a tenth above 900) up to 2048; the first call captures.

    Args:
        model, noise: of all calls.
        calls: how many; the statistics of each are kept.
        rows: most answers that run at once.
        prompt: tokens of a prompt; 256 when not given.
        chunk: most prompt tokens of one pass.
        kv_gb: room for keys and values; all that the rows may need when not given, as far as there is memory.
    """
    cuda = model.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    tokenizer: Any = StubTokenizer(NO_EOS)
    bound = None if kv_gb is None else int(kv_gb * GB)
    engine = Engine(
        model,
        tokenizer,
        max_num_seqs=rows,
        prefill_tokens=chunk,
        kv_bytes=bound,
        paged=None if bound is None else True,
    )
    count, usual, longest = (64, 256, 2048) if model.spec.max_positions > 2304 else (3, 20, 100)
    normal = philox.normal(0, "benchmark/lengths", 8 * count)
    lengths = (0.15 * longest * (0.85 * normal).exp()).clamp(1, longest).long().tolist()
    prompts, results = make_prompts(count, prompt or usual, model.spec.vocab_size), []
    for seed in range(calls):
        # Lengths are imposed through the limit of each row, so that random weights do not decide them.
        _, stats = engine.generate(
            prompts, SamplingSpec(max_new_tokens=longest, seed=seed), group_size=8, noise=noise, limits=lengths
        )
        results.append(stats)
    engine.release()
    return {
        "rows": rows,
        "prompt_tokens": prompt or usual,
        "chunk_tokens": chunk,
        "kv_gb": kv_gb,
        "mean_length": statistics.mean(lengths),
        "longest": max(lengths),
        "peak_gb": torch.cuda.max_memory_allocated() / GB if cuda else None,
        "warm_tokens_per_second_min_max": _extent([stats["tokens_per_second"] for stats in results[1:]]),
        "calls": results,
    }


def _extent(values: list[float]) -> list[float] | None:
    """Least and most; None of none."""
    return [min(values), max(values)] if values else None


def real(folder: str, data: str, prompts: int, answer: int, settings: list[str]) -> dict[str, Any]:
    """A real model on questions of a data set, with its own stops: the sampling of a training step, 8 answers a prompt."""
    from qerl.train.prompts import load_prompts
    from qerl.train.session import open_session

    config = load_config(
        None,
        [
            f"model.path={folder}",
            f"data.train={data}",
            "rollout.max_num_seqs=512",
            f"rollout.max_new_tokens={answer}",
            *settings,
        ],
    )
    session = open_session(config)
    questions, _, _ = load_prompts(config, session.tokenizer, data, "train", prompts)
    results = []
    for seed in range(3):
        _, stats = session.engine.generate(questions, SamplingSpec(max_new_tokens=answer, seed=seed), group_size=8)
        results.append(stats)
    kept = session.config.quant.dense_cache
    return {"model": folder, "data": data, "settings": settings, "dense_cache": kept, "calls": results}

"""How often greedy answers of the engine leave those of ``transformers`` generate, in the same compute type.

    python benchmarks/divergence.py --out results/divergence.json [--model demo] [--data DATA] [--prompts 64] [--answer 128] [--dtypes bfloat16,float32]

Two implementations round differently, so in bfloat16 two nearly equal logits may change places; from there on the answers differ, whichever is
"right". A divergence is the first token of an answer that differs; its rate is over the tokens up to it, and ``gap`` is how much
more probable the engine found its own token than the other's (mean and largest over the divergences), from a whole pass of the engine's model. In float32
there should be none. ``transformers`` gets all prompts in one batch, padded on the left; weights are plain (``quant.format=bf16``), without adapters.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from stored import write_result  # noqa: E402

from qerl.config.load import load_config  # noqa: E402
from qerl.config.schema import Config, QuantConfig  # noqa: E402
from qerl.model.attention import PackedSequences  # noqa: E402
from qerl.model.checkpoint import load_model, resolve_model_path  # noqa: E402
from qerl.model.decoder import Decoder  # noqa: E402
from qerl.model.tokenizer import Tokenizer, load_tokenizer  # noqa: E402
from qerl.records import Prompt, SamplingSpec  # noqa: E402
from qerl.rollout.engine import Engine  # noqa: E402
from qerl.train.prompts import load_prompts  # noqa: E402


def peers_answers(
    folder: Path, prompts: list[Prompt], tokenizer: Tokenizer, answer: int, model: Decoder
) -> list[list[int]]:
    """Greedy answers of ``transformers``, each up to its end."""
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype).to(model.device).eval()
    longest = max(len(prompt.token_ids) for prompt in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64, device=model.device)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
        mask[row, longest - len(prompt.token_ids) :] = 1
    ends = list(tokenizer.eos_ids)
    settings: dict[str, Any] = {
        "do_sample": False,
        "repetition_penalty": 1.0,
        "eos_token_id": ends,
        "pad_token_id": ends[0],
    }
    found = peer.generate(ids, attention_mask=mask, max_new_tokens=answer, **settings)[:, longest:].tolist()
    return [row[: next((i + 1 for i, token in enumerate(row) if token in ends), len(row))] for row in found]


def gap(model: Decoder, prompt: Prompt, before: list[int], own: int, other: int) -> float:
    """p(own) - p(other) after the prompt and the tokens that both chose."""
    ids = [*prompt.token_ids, *before]
    hidden = model(
        torch.tensor(ids, device=model.device), PackedSequences(torch.tensor([0, len(ids)], device=model.device))
    )
    probabilities = torch.softmax(model.logits(hidden[-1:])[0].double(), -1)
    return float(probabilities[own] - probabilities[other])


@torch.no_grad()
def compare(folder: Path, config: Config, answer: int, count: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """The row of the table."""
    tokenizer = load_tokenizer(folder)
    prompts, _, _ = load_prompts(config, tokenizer, config.data.train, "train", count)
    prompts = list(prompts)
    model = load_model(folder, quant=QuantConfig(format="bf16"), lora=None, dtype=dtype, device=device)
    completions, _ = Engine(model, tokenizer).generate(prompts, SamplingSpec(temperature=0.0, max_new_tokens=answer))
    peers = peers_answers(folder, prompts, tokenizer, answer, model)
    tokens, gaps = 0, []
    for prompt, completion, other in zip(prompts, completions, peers, strict=True):
        own = list(completion.token_ids)
        same = next((i for i, pair in enumerate(zip(own, other, strict=False)) if pair[0] != pair[1]), None)
        if same is None:
            assert len(own) == len(other), "one answer is the beginning of the other"
            tokens += len(own)
        else:
            tokens += same + 1
            gaps.append(gap(model, prompt, own[:same], own[same], other[same]))
    return {
        "model": folder.name,
        "device": device,
        "dtype": str(dtype).removeprefix("torch."),
        "prompts": len(prompts),
        "tokens": tokens,
        "answers_that_diverge": len(gaps),
        "divergences_per_1000_tokens": 1e3 * len(gaps) / tokens,
        "gap_mean": sum(map(abs, gaps)) / len(gaps) if gaps else None,
        "gap_largest": max(map(abs, gaps), default=None),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="demo", help="a folder, a NAME under $QERL_MODELS, or demo")
    parser.add_argument("--data", default="arithmetic")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--answer", type=int, default=128, help="most tokens of an answer")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    config = load_config(None, [f"model.path={arguments.model}", f"data.train={arguments.data}"])
    folder = resolve_model_path(arguments.model)
    rows = []
    for dtype in arguments.dtypes.split(","):
        rows.append(
            compare(folder, config, arguments.answer, arguments.prompts, getattr(torch, dtype), arguments.device)
        )
        print(rows[-1], flush=True)
    write_result(arguments.out, rows=rows)


if __name__ == "__main__":
    main()

"""How often greedy answers of the engine leave those of ``transformers`` generate, in the same compute type.

    python benchmarks/divergence.py --out results/divergence.json [--model demo] [--data DATA] [--prompts 64] [--answer 64]
        [--formats bf16,nvfp4] [--dtypes bfloat16,float32]

Two implementations round differently, so in bfloat16 two nearly equal logits may change places; from there on the answers differ, whichever is
"right". A divergence is the first token of an answer that differs. Its rate is over the tokens up to it, each of which may be one, with Wilson's
95 % interval; the share of answers has one too. ``gap`` is how much more probable the engine's model finds the engine's own token than the other's
(mean and largest over the divergences), from one whole pass. In float32 there should be none, which is looked at on the CPU unless asked for elsewhere.

``transformers`` gets all prompts in one batch, padded on the left, and of a quantized format the dequantized weights, rounded to the compute
type: in bfloat16 that is one rounding of each weight that the engine's products do not make, and part of the rate. No adapters. The file is written after every row.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from benchmarks.stored import write_result
from qerl.config.load import load_config
from qerl.config.schema import QuantConfig
from qerl.eval.intervals import wilson
from qerl.formats import dequantize
from qerl.model.attention import PackedSequences
from qerl.model.checkpoint import load_model, resolve_model_path
from qerl.model.decoder import Decoder
from qerl.model.tokenizer import Tokenizer, load_tokenizer
from qerl.records import Prompt, SamplingSpec
from qerl.rollout.engine import Engine
from qerl.train.prompts import load_prompts


def give_weights(model: Decoder, peer: torch.nn.Module) -> None:
    """Give ``transformers``' model the linear layers of ours, dequantized."""
    for index, layer in enumerate(model.layers):
        for shape in model.spec.groups():
            linear = getattr(layer, shape.attribute)
            parts = dequantize(linear.weight, torch.float32).split(linear.sizes)
            for name, values in zip(shape.part_names(index), parts, strict=True):
                peer.get_parameter(f"model.{name}.weight").data.copy_(values)


def peers_answers(peer: Any, prompts: list[Prompt], tokenizer: Tokenizer, answer: int) -> list[list[int]]:
    """Greedy answers of ``transformers``, each up to its end."""
    longest = max(len(prompt.token_ids) for prompt in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64, device=peer.device)
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


def gaps(model: Decoder, splits: list[tuple[list[int], int, int]]) -> list[float]:
    """p(own) - p(other) after the tokens that both had, for each (tokens, own, other)."""
    if not splits:
        return []
    ends = torch.tensor([0, *(len(tokens) for tokens, _, _ in splits)], device=model.device).cumsum(0)
    flat = torch.tensor([token for tokens, _, _ in splits for token in tokens], device=model.device)
    hidden = model(flat, PackedSequences(ends))[ends[1:] - 1]
    probabilities = torch.softmax(model.logits(hidden).double(), -1)
    return [float(row[own] - row[other]) for row, (_, own, other) in zip(probabilities, splits, strict=True)]


@torch.no_grad()
def compare(model: Decoder, peer: Any, tokenizer: Tokenizer, prompts: list[Prompt], answer: int) -> dict[str, Any]:
    """What a row says of two models with the same weights."""
    completions, _ = Engine(model, tokenizer).generate(prompts, SamplingSpec(temperature=0.0, max_new_tokens=answer))
    others = peers_answers(peer, prompts, tokenizer, answer)
    tokens, splits = 0, []
    for prompt, completion, other in zip(prompts, completions, others, strict=True):
        own = list(completion.token_ids)
        same = next((i for i, pair in enumerate(zip(own, other, strict=False)) if pair[0] != pair[1]), None)
        if same is None:
            assert len(own) == len(other), "one answer is the beginning of the other"
            tokens += len(own)
        else:
            tokens += same + 1
            splits.append(([*prompt.token_ids, *own[:same]], own[same], other[same]))
    found = gaps(model, splits)
    return {
        "prompts": len(prompts),
        "tokens": tokens,
        "answers_that_diverge": len(found),
        "share_of_answers_interval": wilson(len(found), len(prompts)),
        "divergences_per_1000_tokens": 1e3 * len(found) / tokens,
        "divergences_per_1000_tokens_interval": [1e3 * end for end in wilson(len(found), tokens)],
        "gap_mean": sum(map(abs, found)) / len(found) if found else None,
        "gap_largest": max(map(abs, found), default=None),
    }


def load_peer(folder: Path, dtype: torch.dtype, device: str) -> Any:
    """``transformers``' model of a folder."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="demo", help="a folder, a NAME under $QERL_MODELS, or demo")
    parser.add_argument("--data", default="arithmetic")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--answer", type=int, default=64, help="most tokens of an answer")
    parser.add_argument("--formats", default="bf16,nvfp4", help="of the weights")
    parser.add_argument("--dtypes", help="bfloat16,float32, and on a GPU bfloat16 alone, when not given")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device, formats = arguments.device, arguments.formats.split(",")
    config = load_config(None, [f"model.path={arguments.model}", f"data.train={arguments.data}"])
    folder = resolve_model_path(arguments.model)
    tokenizer = load_tokenizer(folder)
    prompts = list(load_prompts(config, tokenizer, config.data.train, "train", arguments.prompts)[0])
    rows: list[dict[str, Any]] = []
    for name in (arguments.dtypes or ("bfloat16,float32" if device == "cpu" else "bfloat16")).split(","):
        dtype = getattr(torch, name)
        peer = load_peer(folder, dtype, device)
        for format_name in formats:
            began = time.perf_counter()
            quant = QuantConfig.model_validate({"format": format_name})
            model = load_model(folder, quant=quant, lora=None, dtype=dtype, device=device)
            give_weights(model, peer)
            row = {"model": folder.name, "device": device, "format": format_name, "dtype": name}
            row |= compare(model, peer, tokenizer, prompts, arguments.answer)
            rows.append(row | {"seconds": time.perf_counter() - began})
            print(rows[-1], flush=True)
            write_result(arguments.out, rows=rows)


if __name__ == "__main__":
    main()

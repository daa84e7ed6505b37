"""What rounding keys and values costs a model: teacher-forced, against the same model with them as computed.

    QERL_MODELS=MODELS python benchmarks/kv_formats.py MODEL [MODEL …] --out results/kv_formats.json

Plain weights in float32. Keys and values of every token are rounded as a format would store them, and the whole distribution of each next
token is compared: KL from the plain model, and |Δp| and |Δlog p| of a token drawn from it. ``fp8`` and ``fp8_values`` are what ``rollout.kv_format``
offers; the others are there to compare: bfloat16, and FP8 or 8-bit integers with a scale for each token and head.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import Tensor

from benchmarks.stored import write_result
from qerl.config.schema import QuantConfig
from qerl.kernels.cached_attention.storage import FP8, FP8_LARGEST, stored
from qerl.model.attention import PackedSequences
from qerl.model.checkpoint import load_model, resolve_model_path
from qerl.model.decoder import Decoder
from qerl.model.tokenizer import load_tokenizer

TEXTS = (
    (
        "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did Natalia sell "
        "altogether in April and May?\nNatalia sold 48/2 = 24 clips in May. Natalia sold 48+24 = 72 clips altogether in April and May. #### 72"
    ),
    (
        "A baker makes 12 trays of 15 rolls. She keeps 20 rolls and packs the others in bags of 8. How many bags does she fill?\n"
        "She makes 12 * 15 = 180 rolls and packs 180 - 20 = 160 of them. 160 / 8 = 20, so she fills 20 bags. #### 20"
    ),
    (
        "Tom reads 14 pages a day for the first week and 20 pages a day after that. After how many days has he read 238 pages?\n"
        "In the first week he reads 7 * 14 = 98 pages. 238 - 98 = 140 pages are left, which take 140 / 20 = 7 days. So 14 days. #### 14"
    ),
    (
        "def quicksort(values):\n    if len(values) < 2:\n        return values\n    pivot = values[len(values) // 2]\n"
        "    left = [x for x in values if x < pivot]\n    middle = [x for x in values if x == pivot]\n"
        "    right = [x for x in values if x > pivot]\n    return quicksort(left) + middle + quicksort(right)\n"
    ),
)


def fp8(x_TKd: Tensor) -> Tensor:
    return stored(x_TKd, FP8).float()


def fp8_scaled(x_TKd: Tensor) -> Tensor:
    scale_TK1 = x_TKd.abs().amax(-1, keepdim=True) / FP8_LARGEST
    return fp8(x_TKd / scale_TK1) * scale_TK1


def int8_scaled(x_TKd: Tensor) -> Tensor:
    scale_TK1 = x_TKd.abs().amax(-1, keepdim=True) / 127
    return (x_TKd / scale_TK1).round() * scale_TK1


def bfloat16(x_TKd: Tensor) -> Tensor:
    return x_TKd.bfloat16().float()


def as_it_is(x_TKd: Tensor) -> Tensor:
    return x_TKd


# name -> (of keys, of values)
FORMATS = {
    "bfloat16": (bfloat16, bfloat16),
    "fp8_values": (as_it_is, fp8),
    "fp8_keys": (fp8, as_it_is),
    "fp8": (fp8, fp8),
    "fp8_scaled": (fp8_scaled, fp8_scaled),
    "int8_scaled": (int8_scaled, int8_scaled),
}


class Rounded(PackedSequences):
    """Attends to keys and values as a format stores them."""

    def __init__(self, bounds_S1: Tensor, name: str | None):
        super().__init__(bounds_S1)
        self._round = (as_it_is, as_it_is) if name is None else FORMATS[name]

    def attend_heads(self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        return super().attend_heads(q_THd, self._round[0](k_TKd), self._round[1](v_TKd))


@torch.no_grad()
def compare(model: Decoder, texts: list[list[int]]) -> list[dict[str, Any]]:
    """One row a format."""
    bounds_S1 = torch.tensor([0, *(len(ids) for ids in texts)]).cumsum(0)
    tokens_T = torch.tensor([token for ids in texts for token in ids])

    def distribution(name: str | None) -> Tensor:
        return torch.log_softmax(model.logits(model(tokens_T, Rounded(bounds_S1, name))).double(), -1)

    plain_TV = distribution(None)
    drawn_T1 = torch.multinomial(plain_TV.exp().float(), 1, generator=torch.Generator().manual_seed(0))
    rows = []
    for name in FORMATS:
        found_TV = distribution(name)
        kl_T = (plain_TV.exp() * (plain_TV - found_TV)).sum(-1)
        before_T1, after_T1 = (logprobs.gather(1, drawn_T1) for logprobs in (plain_TV, found_TV))
        row = {
            "format": name,
            "tokens": len(tokens_T),
            "kl": float(kl_T.mean()),
            "kl_largest": float(kl_T.max()),
            "mean_abs_dp": float((before_T1.exp() - after_T1.exp()).abs().mean()),
            "mean_abs_dlogp": float((before_T1 - after_T1).abs().mean()),
            "same_likeliest": float((plain_TV.argmax(-1) == found_TV.argmax(-1)).double().mean()),
        }
        rows.append(row)
        print(
            {key: value if isinstance(value, str) else float(f"{value:.3g}") for key, value in row.items()}, flush=True
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="folders, or NAMEs under $QERL_MODELS")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rows = []
    for name in arguments.models:
        folder = resolve_model_path(name)
        print(folder.name, flush=True)
        model = load_model(folder, quant=QuantConfig(format="bf16"), lora=None, dtype=torch.float32)
        tokenizer = load_tokenizer(folder)
        texts = [list(tokenizer.encode(text)) for text in TEXTS]
        rows += [{"model": folder.name, **row} for row in compare(model, texts)]
        del model
    write_result(arguments.out, rows=rows)


if __name__ == "__main__":
    main()

"""What is left of small adapters in outputs of bfloat16, where a product is rounded before they are added and where it is not.

    QERL_MODELS=MODELS python benchmarks/young_adapters.py MODEL [MODEL …] --out results/young_adapters_cpu.json
    python benchmarks/young_adapters.py --products --out results/young_adapters_h200.json

An emulation of MODEL in float32: what kernels round to bfloat16 in linear layers is rounded, and nothing else. B is `size` times the sign of the gradient of the mean log-prob of
short answers, all entries alike, as after a first update of AdamW. Inputs of products, A, A x and B are in bfloat16; outputs of q, k, v, gate and up are, those of o and down are not, and biases are added in float32
to what has been rounded (`model.stream_dtype=float32`).
With c = scale * B A x, the three ways are

    sum      y = round(x W^T + c)             all that multiplies 4-bit weights, kept values, or adapters as columns
    apart    y = round(x W^T + round(c))
    rounded  y = round(round(x W^T) + c)      a product of its own, to which adapters are added: PEFT; large unquantized weights

`effect_…` is the mean change of the answers' log-probs from B = 0, in nats a token; `share_…` what the outputs in bfloat16 have of c, 1 for all of it; `between` the mean |Δ log p| and |Δp| of the
first way and the last.

`--products` asks the device's own y = y + x W^T in bfloat16 which of these it is: y begins with c, a fifth of a spacing of the result, and the share that is left of it is about 1, or 0.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import Tensor, nn

from benchmarks.stored import write_result
from qerl.config.schema import LoraConfig, QuantConfig
from qerl.kernels.fp4_linear.dense import _Float32Sums
from qerl.model.attention import PackedSequences
from qerl.model.checkpoint import load_model, resolve_model_path
from qerl.model.decoder import Decoder
from qerl.model.linear import GroupedLinear
from qerl.model.tokenizer import Tokenizer, load_tokenizer

WAYS = ("sum", "apart", "rounded")
SIZES = (1e-5, 3e-5, 1e-4, 2e-4, 4e-4, 1e-3)
SUMS = ((34, 17), (12, 5), (81, 9), (45, 45), (7, 60), (23, 54), (66, 13), (90, 8))
PRODUCTS = {
    "135M q k v": (960, 576),
    "135M gate up": (3072, 576),
    "0.5B q k v": (1152, 896),
    "0.5B gate up": (9728, 896),
    "7B q k v": (4608, 3584),
}
"""Outputs and inputs of what has outputs in bfloat16."""


class _Bfloat16(torch.autograd.Function):
    """Rounds; gradients go through as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.bfloat16().float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def rounded(x: Tensor) -> Tensor:
    return _Bfloat16.apply(x)


class Emulated(nn.Module):
    """A linear layer whose sums are rounded in the way that is chosen.

    Attributes:
        way: one of ``WAYS``.
        kept, added: sums over outputs of what adapters changed, in their direction, and of what they add.
    """

    def __init__(self, inner: GroupedLinear, wide: bool):
        super().__init__()
        self.inner, self.wide, self.parts, self.way = inner, wide, inner.parts, WAYS[0]
        self.kept = self.added = 0.0

    def stacked(self, x_TI: Tensor, adapters: bool = True, **_: Any) -> Tensor:
        assert adapters and self.inner.lora is not None
        x_TI, lora = rounded(x_TI), self.inner.lora
        base_TO = x_TI @ self.inner.weight.tensors["weight"].T
        h_TR = rounded(x_TI @ rounded(lora.lora_a).T)
        pairs = zip(h_TR.split(lora.rank, -1), lora.lora_b, strict=True)
        c_TO = torch.cat([lora.scale * h @ rounded(b).T for h, b in pairs], -1)
        if self.wide:
            return self._biased(base_TO + c_TO)
        if self.way == "rounded":
            y_TO = rounded(rounded(base_TO) + c_TO)
        else:
            y_TO = rounded(base_TO + (c_TO if self.way == "sum" else rounded(c_TO)))
        if not torch.is_grad_enabled():
            self.kept += float(((y_TO - rounded(base_TO)) * c_TO.sign()).sum())
            self.added += float(c_TO.abs().sum())
        return self._biased(y_TO)

    def _biased(self, y_TO: Tensor) -> Tensor:
        return y_TO if self.inner.added_O is None else y_TO + self.inner.added_O


class Answers:
    """Short answers of a model, and their log-probs as an emulation of it gives them."""

    def __init__(self, model: Decoder, tokenizer: Tokenizer):
        self._model, ids, first, self._asked = model, [], [0], []
        for a, b in SUMS:
            question = f"{a} + {b} Reply with: The answer is N."
            prompt = list(tokenizer.encode(tokenizer.render([{"role": "user", "content": question}])))
            answer = list(tokenizer.encode(f"The answer is {a + b}."))
            ids += prompt + answer
            self._asked += range(first[-1] + len(prompt) - 1, len(ids) - 1)
            first.append(len(ids))
        self._ids_T, self._bounds_S1 = torch.tensor(ids), torch.tensor(first)
        self.layers: list[Emulated] = []
        for layer in model.layers:
            for name in ("qkv", "o", "gate_up", "down"):
                made = Emulated(getattr(layer, name), wide=name in ("o", "down"))
                setattr(layer, name, made)
                self.layers.append(made)

    def logprobs(self) -> Tensor:
        """float32 [tokens of all answers]."""
        hidden_TD = self._model(self._ids_T, PackedSequences(self._bounds_S1))
        logprobs_NV = torch.log_softmax(self._model.logits(hidden_TD[self._asked]), -1)
        return logprobs_NV.gather(1, self._ids_T[1:][self._asked][:, None])[:, 0]

    def in_way(self, way: str) -> tuple[Tensor, float]:
        """(log-probs, what the outputs have of what adapters add)."""
        for layer in self.layers:
            layer.way, layer.kept, layer.added = way, 0.0, 0.0
        found = self.logprobs()
        added = sum(layer.added for layer in self.layers)
        return found, sum(layer.kept for layer in self.layers) / added if added else 0.0


def emulate(model: Decoder, tokenizer: Tokenizer, sizes: Sequence[float]) -> list[dict[str, Any]]:
    """One row a size of B's entries."""
    answers = Answers(model, tokenizer)
    answers.logprobs().mean().backward()
    matrices = [b for layer in answers.layers if layer.inner.lora for b in layer.inner.lora.lora_b]
    signs = [b.grad.sign() for b in matrices if b.grad is not None]
    rows = []
    with torch.no_grad():
        before, _ = answers.in_way("sum")
        for size in sizes:
            for b, sign in zip(matrices, signs, strict=True):
                b.copy_(size * sign)
            found = {way: answers.in_way(way) for way in WAYS}
            first, last = found["sum"][0], found["rounded"][0]
            row: dict[str, Any] = {"size": size, "tokens": len(before)}
            row |= {f"effect_{way}": float((logprobs - before).mean()) for way, (logprobs, _) in found.items()}
            row |= {f"share_{way}": share for way, (_, share) in found.items()}
            row["between_mean_abs_dlogp"] = float((first - last).abs().mean())
            row["between_mean_abs_dp"] = float((first.exp() - last.exp()).abs().mean())
            rows.append(row)
            print({key: float(f"{value:.3g}") for key, value in row.items()}, flush=True)
    return rows


@torch.no_grad()
def share_in_output(rows: int, outputs: int, inputs: int, device: str) -> float:
    """What the device's y + x W^T in bfloat16 leaves of a y that is a fifth of a spacing of the result everywhere, on average."""
    generator = torch.Generator(device=device).manual_seed(0)
    x_TI = torch.randn(rows, inputs, generator=generator, device=device).bfloat16()
    w_OI = torch.randn(outputs, inputs, generator=generator, device=device).bfloat16()
    plain_TO = x_TI @ w_OI.T
    # The spacing of bfloat16 in [2^e, 2^(e+1)) is 2^(e-7); frexp gives e + 1.
    c_TO = torch.ldexp(torch.full_like(plain_TO, 0.2), torch.frexp(plain_TO.float())[1] - 8)
    y_TO = c_TO.clone()
    with _Float32Sums():
        y_TO.addmm_(x_TI, w_OI.T)
    return float(((y_TO.float() - plain_TO.float()) / c_TO.float()).mean())


def measure_products(rows: Sequence[int], device: str) -> list[dict[str, Any]]:
    found = []
    for name, (outputs, inputs) in PRODUCTS.items():
        for count in rows:
            share = share_in_output(count, outputs, inputs, device)
            found.append({"product": name, "rows": count, "outputs": outputs, "inputs": inputs, "share": share})
            print(f"{name:14} {count:6} rows: {share:.3f} of what was in the output", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="folders, or NAMEs under $QERL_MODELS")
    parser.add_argument("--sizes", nargs="+", type=float, default=SIZES, help="of the entries of scale * B")
    parser.add_argument("--products", action="store_true", help="ask the device's products")
    parser.add_argument("--rows", nargs="+", type=int, default=(100, 1000, 2500, 5000, 20000), help="of --products")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="of --products")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if bool(arguments.models) == arguments.products:
        parser.error("either models or --products")
    if arguments.products:
        write_result(arguments.out, rows=measure_products(arguments.rows, arguments.device))
        return
    rows = []
    for name in arguments.models:
        folder = resolve_model_path(name)
        print(folder.name, flush=True)
        lora = LoraConfig(rank=32, alpha=32, train_norms=False)
        quant = QuantConfig(format="bf16")
        model = load_model(folder, quant=quant, lora=lora, dtype=torch.float32)
        rows += [{"model": folder.name, **row} for row in emulate(model, load_tokenizer(folder), arguments.sizes)]
        del model
    write_result(arguments.out, rows=rows)


if __name__ == "__main__":
    main()

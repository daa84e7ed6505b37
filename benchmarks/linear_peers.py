"""Linear layers of other libraries for `benchmarks/kernels.py`, without adapters: humming on NVFP4, bitsandbytes on NF4."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

from qerl.formats import dequantize, get_format


class Projection(Protocol):
    """What is multiplied."""

    dense_OI: Tensor
    bias_O: Tensor | None


class Peer(Protocol):
    """One library's copy of some layers."""

    label: str
    """In results: library and format."""

    def prepare(self, rows: Sequence[int]) -> None:
        """Compile whatever these rows of x need."""

    def product(self, linear: Projection, x_TI: Tensor) -> Tensor:
        """x W^T + bias [T, O] of a projection that it was given."""

    def exact(self, linear: Projection) -> Tensor:
        """float64 [O, I]: the weight as stored."""


class Humming:
    """humming-kernels: 4-bit weights with bfloat16 activations. Codes and scales are made by qerl, one divisor a fused projection."""

    label = "humming nvfp4"

    def __init__(self, linears: Sequence[Projection]):
        self._layers: dict[int, Any] = {id(linear): self._layer(linear) for linear in linears}
        self._tuned: dict[tuple[int, int], Any] = {}

    @staticmethod
    def _layer(linear: Projection) -> Any:
        from humming.layer import HummingLayer

        rows, inputs = linear.dense_OI.shape
        stored = get_format("nvfp4").quantize(linear.dense_OI, segments=(rows,)).tensors
        layer = HummingLayer(
            shape_n=rows,
            shape_k=inputs,
            weight_config={
                "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "type": "float", "num_bits": 4,
                "strategy": "tensor_group", "group_size": 16,
            },
            has_bias=linear.bias_O is not None,
            torch_dtype=torch.bfloat16,
        ).to(linear.dense_OI.device)  # fmt: skip
        tensors = {
            "weight_packed": stored["packed"],
            "weight_scale": stored["block_scales"],
            "weight_global_scale": stored["global_scale"],
        }
        layer.load_from_tensors(tensors if linear.bias_O is None else tensors | {"bias": linear.bias_O})
        layer.transform()
        return layer

    def prepare(self, rows: Sequence[int]) -> None:
        """Its choice for each number of rows, all at once: by itself it compiles what it has for every number."""
        from humming.kernel.humming import HummingKernel
        from humming.tune import get_heuristics_config

        began = time.monotonic()
        wanted = {}
        for key, layer in self._layers.items():
            for count in rows:
                tuned = self._tuned[key, count] = get_heuristics_config(layer.humming_config, count)
                wanted[layer.humming_config.to_str(), str(tuned)] = tuned
        device = torch.cuda.current_device()

        def compile_one(item: tuple[tuple[str, str], Any]) -> None:
            HummingKernel.prepare_kernels(item[0][0], None, item[1], device)

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(compile_one, wanted.items()))
        print(f"{self.label}: {len(wanted)} kernels, {time.monotonic() - began:.1f} s", flush=True)

    def product(self, linear: Projection, x_TI: Tensor) -> Tensor:
        return self._layers[id(linear)](x_TI, tuning_config=self._tuned[id(linear), len(x_TI)])

    def exact(self, linear: Projection) -> Tensor:
        fmt = get_format("nvfp4")
        return dequantize(fmt.quantize(linear.dense_OI, segments=(len(linear.dense_OI),)), torch.float64)


class Bitsandbytes:
    """bitsandbytes: NF4 with absmax in float32."""

    label = "bitsandbytes nf4"

    def __init__(self, linears: Sequence[Projection]):
        from bitsandbytes.functional import quantize_4bit

        self._stored = {id(linear): quantize_4bit(linear.dense_OI, quant_type="nf4") for linear in linears}

    def prepare(self, rows: Sequence[int]) -> None:
        """Nothing is compiled."""

    def product(self, linear: Projection, x_TI: Tensor) -> Tensor:
        from bitsandbytes import matmul_4bit

        codes, state = self._stored[id(linear)]
        return matmul_4bit(x_TI, codes.t(), quant_state=state, bias=linear.bias_O)

    def exact(self, linear: Projection) -> Tensor:
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(*self._stored[id(linear)]).double()


PEERS: dict[str, Callable[[Sequence[Projection]], Peer]] = {"humming": Humming, "bitsandbytes": Bitsandbytes}
"""By the name of the module that each imports where it is used."""


PACKAGES = {"humming": "humming-kernels"}
"""Where a package has another name than its module."""


def require(names: Sequence[str]) -> None:
    """Ends the program where a library is asked for that is unknown or not installed."""
    for name in names:
        if name not in PEERS:
            raise SystemExit(f"error: unknown peer '{name}' (one of {', '.join(PEERS)})")
        if importlib.util.find_spec(name) is None:
            raise SystemExit(f"error: --peers {name} is not installed (pip install {PACKAGES.get(name, name)})")


def largest_error(peer: Peer, linears: Sequence[Projection], rows: int) -> float:
    """Of any projection, in norm, against float64 with the weight as stored."""
    errors = []
    for linear in linears:
        x_TI = torch.randn(rows, linear.dense_OI.shape[1], device=linear.dense_OI.device).bfloat16()
        expected = x_TI.double() @ peer.exact(linear).T
        if linear.bias_O is not None:
            expected += linear.bias_O.double()
        errors.append(float((peer.product(linear, x_TI).double() - expected).norm() / expected.norm()))
    return max(errors)

"""One linear layer for a group of projections that read the same input: frozen and possibly 4-bit, with adapters, or trained.

Shape legend: T tokens, I input width, O output rows of all members.

Members: q/k/v, gate/up, and o and down alone. Their rows are stacked in one packed weight, so a group is one product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from qerl.formats import PackedWeight, dequantize
from qerl.kernels.fp4_linear import AdapterPart, fp4_linear, keep, keeps, served
from qerl.kernels.product import product
from qerl.model.lora import LoraGroup


class GroupedLinear(nn.Module):
    """y = W_hat x + bias (unless it is added later), plus (alpha / r) B A x on the targeted members.

    Args:
        name: name for messages and reports, e.g. ``layers.0.self_attn.qkv_proj``.
        parts: names of the members in row order, e.g. ``("q_proj", "k_proj", "v_proj")``.
        sizes: rows of each member.
        weight: the stacked rows; frozen unless ``trained``.
        bias_O: stacked bias in compute type.
        lora: adapters of the targeted members.
        dense_OI: dequantized copy of ``weight`` in compute type that the product reads instead, where memory allows.
        trained: the weight (which must be unquantized) and the bias are parameters that learn.
        bias_apart: whoever reads the outputs adds the bias, in float32; they come without it.

    Attributes:
        trained_OI: the weight as a parameter, on the storage of ``weight``; None when it is frozen.
    """

    def __init__(
        self,
        name: str,
        parts: Sequence[str],
        sizes: Sequence[int],
        weight: PackedWeight,
        *,
        bias_O: Tensor | None = None,
        lora: LoraGroup | None = None,
        dense_OI: Tensor | None = None,
        trained: bool = False,
        bias_apart: bool = False,
    ):
        super().__init__()
        assert sum(sizes) == weight.shape[0], (name, sizes, weight.shape)
        self.name = name
        self.parts = tuple(parts)
        self.sizes = tuple(sizes)
        self.weight = weight
        self.bias_O = nn.Parameter(bias_O) if trained and bias_O is not None else bias_O
        self.lora = lora
        self.dense_OI = dense_OI
        assert not trained or (weight.format == "bf16" and lora is None), name
        self.bias_apart = bias_apart
        assert not (trained and bias_apart), name
        self.trained_OI = nn.Parameter(weight.tensors["weight"]) if trained else None

    @property
    def added_O(self) -> Tensor | None:
        """The bias as far as outputs have it."""
        return None if self.bias_apart else self.bias_O

    def stacked(
        self, x_TI: Tensor, adapters: bool = True, *, dtype: torch.dtype | None = None, output: bool = True
    ) -> Tensor:
        """Outputs of all members side by side, [T, O] in ``dtype``, which is the type of ``x_TI`` when not given. Without ``output``
        what the backward pass needs is made, and the outputs need not be."""
        if self.trained_OI is not None:
            return product(x_TI, self.trained_OI, self.bias_O).to(dtype or x_TI.dtype)
        parts = self.lora.adapter_parts(x_TI.dtype) if adapters and self.lora is not None else ()
        return fp4_linear(x_TI, self.weight, self.added_O, parts, self.dense_OI, dtype=dtype, output=output)

    def forward(self, x_TI: Tensor, adapters: bool = True) -> tuple[Tensor, ...]:
        """Output of each member, [T, rows] a member, in the type of ``x_TI``."""
        return self.stacked(x_TI, adapters).split(self.sizes, dim=-1)

    def member(self, part: str, x_TI: Tensor, adapters: bool = True, *, dtype: torch.dtype | None = None) -> Tensor:
        """Output of one member alone, [T, its rows], for an input of its own, in ``dtype`` or the type of the input.

        From the dense copy where there is one; else the whole packed product is formed and the member's rows are kept,
        since not every format can be cut by rows.
        """
        start, stop = self.rows_of(part)
        bias_O = None if self.added_O is None else self.added_O[start:stop]
        if self.trained_OI is not None:
            return product(x_TI, self.trained_OI[start:stop], bias_O).to(dtype or x_TI.dtype)
        dense_OI = self.weight.tensors["weight"] if self.weight.format == "bf16" else self.dense_OI
        if dense_OI is None:
            return self.stacked(x_TI, adapters, dtype=dtype)[:, start:stop]
        own = [
            AdapterPart(
                start=0,
                stop=stop - start,
                a_RI=item.a_RI[item.rank_start : item.rank_start + item.b_OR.shape[1]],
                b_OR=item.b_OR,
                scale=item.scale,
            )
            for item in (self.lora.adapter_parts(x_TI.dtype) if adapters and self.lora is not None else ())
            if item.start == start
        ]
        return fp4_linear(x_TI, self.weight, bias_O, own, dense_OI[start:stop], dtype=dtype)

    def rows_of(self, part: str) -> tuple[int, int]:
        """First row of a member, and the row after its last."""
        index = self.parts.index(part)
        start = sum(self.sizes[:index])
        return start, start + self.sizes[index]

    def extra_repr(self) -> str:
        return f"{self.name}, {self.weight.format}, {dict(zip(self.parts, self.sizes, strict=True))}"


def with_copy(
    weight: PackedWeight, dtype: torch.dtype, *, keep_dense: bool, kernel_reads_plain: bool = True
) -> tuple[PackedWeight, Tensor | None]:
    """(the weight, its dequantized copy) as `GroupedLinear` and a packed head take them; what the CUDA kernels read instead comes with the weight.

    Args:
        weight: [O, I], in the order of its device.
        dtype: compute type, that of the copy.
        keep_dense: packed weights have copies.
        kernel_reads_plain: the kernel of kept values reads small unquantized weights; not those that train.

    Raises:
        KernelUnavailableError: a kernel cannot be compiled here.
    """
    # An unquantized weight in compute type is its own dense copy, at no cost.
    if weight.format == "bf16":
        if kernel_reads_plain and keeps(weight, dtype):
            return keep(weight), None
        return weight, weight.tensors["weight"]
    if not keep_dense:
        return weight, None
    if served(weight.device, dtype):
        return keep(weight) if keeps(weight, dtype) else weight, None
    return weight, dequantize(weight, dtype)

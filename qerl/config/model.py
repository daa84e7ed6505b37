"""The ``model`` section: which checkpoint, on which device, and the types of its arithmetic."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from qerl.config.section import Section


class ModelConfig(Section):
    """Which checkpoint, and what arithmetic."""

    path: str | None = None
    """Model folder, a NAME under $QERL_MODELS, or `demo` for the packaged tiny model."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute type of the decoder. Norms, logits, LoRA master weights and log-probs are float32 in either case."""
    stream_dtype: Literal["compute", "float32"] = "compute"
    """Type of the residual stream and of what is added to it. `float32` with `dtype: bfloat16`: neither is rounded, nor are the biases of q, k and v, and engine and trainer differ by less; layer inputs that training keeps are twice as large."""
    attention_dtype: Literal["compute", "float16"] = "compute"
    """Type of q, k and v, of keys and values in the cache, and of what attention multiplies. `float16` with `dtype: bfloat16`: the same bytes with three more bits, and a range to 65,504; projections of q, k and v, and their biases, are not rounded before they are rotated. Engine and trainer differ by less (docs/reliability.md)."""
    device: str = "auto"
    """`auto` (CUDA when there is one), `cpu`, `cuda` or `cuda:N`."""

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if self.attention_dtype == "float16" and self.dtype != "bfloat16":
            raise ValueError(
                f"model.attention_dtype=float16 keeps more than bfloat16 and less than model.dtype={self.dtype}: "
                "set model.attention_dtype=compute"
            )
        return self

"""The decoder: one definition for training and generation, over a flat run of tokens.

Shape legend: T tokens of all sequences, N selected positions, D hidden size, V vocabulary, H query heads, K key/value
heads, d head dimension, P positions of the rotation table.

Which tokens see which is the context's business (``qerl.model.attention``); noise and adapters are arguments of a
call. Nothing about a call is stored on the model, so a call cannot leave the model in another state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from qerl.formats import PackedWeight
from qerl.kernels.activation import silu_mul
from qerl.kernels.rms_norm import NormNoise, add_rms_norm, rms_norm
from qerl.kernels.rope import HeadBias, HeadNorms
from qerl.kernels.token_logprobs import Head, head_logits
from qerl.model.aqn import NoisePass, NoiseSource
from qerl.model.attention import AttentionContext, Rotary
from qerl.model.linear import GroupedLinear
from qerl.model.recompute import Checkpointing, FirstAndAgain, kept_here, kept_on_host, made_again
from qerl.model.rotation import head_bias, rotation_table
from qerl.model.spec import ModelSpec

LAYER_NORMS = ("attn_norm", "mlp_norm")
"""The two norms of a layer that may be trained, as attribute names and as noise sites."""


class DecoderLayer(nn.Module):
    """Pre-norm transformer layer: attention, then the gated MLP. Norm scales are float32 [D] (q/k norms [d]).

    Products are in ``dtype``, the compute type. The residual stream, and what attention and the MLP add to it, are in ``stream_dtype``,
    that or float32: rounding the stream after every addition is the largest rounding of all. Attention's own products are in
    ``attention_dtype``, that or float16, which has a smaller range and three more bits than bfloat16; projections of q, k and v are then not rounded before
    they are heads.
    """

    def __init__(
        self,
        index: int,
        spec: ModelSpec,
        *,
        dtype: torch.dtype,
        stream_dtype: torch.dtype,
        attention_dtype: torch.dtype,
        attn_norm: Tensor,
        qkv: GroupedLinear,
        o: GroupedLinear,
        mlp_norm: Tensor,
        gate_up: GroupedLinear,
        down: GroupedLinear,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        train_norms: bool = False,
        train_head_norms: bool = False,
    ):
        super().__init__()
        self.index = index
        self.spec = spec
        self.dtype = dtype
        self.stream_dtype = stream_dtype
        self.attention_dtype = attention_dtype
        self.attn_norm = nn.Parameter(attn_norm, requires_grad=train_norms)
        self.qkv = qkv
        self.o = o
        self.mlp_norm = nn.Parameter(mlp_norm, requires_grad=train_norms)
        self.gate_up = gate_up
        self.down = down
        self.q_norm = None if q_norm is None else nn.Parameter(q_norm, requires_grad=train_head_norms)
        self.k_norm = None if k_norm is None else nn.Parameter(k_norm, requires_grad=train_head_norms)
        self.reference_norms: dict[str, Tensor] = {}
        self.head_bias: HeadBias | None = None

    @property
    def qkv_dtype(self) -> torch.dtype:
        """Of the projections of q, k and v."""
        return self.dtype if self.attention_dtype == self.dtype else torch.float32

    @property
    def products(self) -> tuple[tuple[GroupedLinear, torch.dtype], ...]:
        """Each linear layer, in the order in which they run, and the type of its output."""
        wide = self.stream_dtype
        return (self.qkv, self.qkv_dtype), (self.o, wide), (self.gate_up, self.dtype), (self.down, wide)

    def forward(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        rotation: tuple[Tensor, Tensor],
        context: AttentionContext,
        noise: NoisePass | None,
        adapters: bool,
        reference: bool,
        selective: bool = False,
        output: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """(output of the MLP, stream before it): the next layer adds them, in the same pass over memory as its norm.

        ``x_TD`` and ``residual_TD`` are the same of the layer before; with no residual, x is the stream itself. ``selective``:
        inputs of linear layers that are cheap to make are made again in the backward pass. Without ``output`` what the backward pass
        needs is made, which the last product, a quarter of a layer's arithmetic, is no part of.
        """
        call = (noise, adapters, reference, selective)
        qkv_TX, stream_TD = self._normed("attn_norm", self.qkv, x_TD, residual_TD, *call)
        o_TD = self._attention(qkv_TX, rotation, context, noise, adapters)
        del qkv_TX
        gate_up_TX, stream_TD = self._normed("mlp_norm", self.gate_up, o_TD, stream_TD, *call)
        # Names keep tensors alive: without gradients the widest moment is the next.
        del o_TD
        inner_TF = silu_mul(gate_up_TX)
        again = made_again(inner_TF, partial(silu_mul, gate_up_TX.detach())) if selective else kept_here()
        # The last product may copy what it reads, to have adapters beside it.
        del gate_up_TX
        with again:
            return self.down.stacked(inner_TF, adapters, dtype=self.stream_dtype, output=output), stream_TD

    def whole(self, x_TD: Tensor, *arguments: Any, output: bool) -> Tensor:
        """The residual stream after the layer, from that before it; arguments as of ``forward``."""
        o_TD, stream_TD = self(x_TD, None, *arguments, output=output)
        return stream_TD + o_TD

    def after_attention(
        self, x_TD: Tensor, rotation: tuple[Tensor, Tensor], context: AttentionContext, noise: NoisePass | None
    ) -> Tensor:
        """First half, with adapters: what ``mlp_norm`` reads."""
        qkv_TX, stream_TD = self._normed("attn_norm", self.qkv, x_TD, None, noise, True, False)
        return stream_TD + self._attention(qkv_TX, rotation, context, noise, True)

    def after_mlp(self, x_TD: Tensor, noise: NoisePass | None) -> Tensor:
        """Second half, with adapters: what the next layer's ``attn_norm`` reads."""
        gate_up_TX, stream_TD = self._normed("mlp_norm", self.gate_up, x_TD, None, noise, True, False)
        return stream_TD + self.down.stacked(silu_mul(gate_up_TX), dtype=self.stream_dtype)

    def _normed(
        self,
        site: str,
        linear: GroupedLinear,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        noise: NoisePass | None,
        adapters: bool,
        reference: bool,
        selective: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The projections that read a norm, applied to it: [T, rows of all], and the stream that the norm reads. One product,
        or one a projection where each has a draw of its own."""
        weight_D, eps = self.reference_norms[site] if reference else getattr(self, site), self.spec.rms_eps
        dtype = self.qkv_dtype if linear is self.qkv else self.dtype
        if noise is None or not noise.independent:
            z = None if noise is None else noise.of_norm(self.index, site)
            h_TD, stream_TD = add_rms_norm(x_TD, residual_TD, weight_D, eps, z, dtype=self.dtype)
            with self._norm_again(h_TD, stream_TD, weight_D, z) if selective else kept_here():
                return linear.stacked(h_TD, adapters, dtype=dtype), stream_TD
        stream_TD = x_TD if residual_TD is None else residual_TD + x_TD
        outputs = []
        for part in linear.parts:
            z = noise.of_norm(self.index, f"{site}/{part}")
            h_TD = rms_norm(stream_TD, weight_D, eps, z, dtype=self.dtype)
            with self._norm_again(h_TD, stream_TD, weight_D, z) if selective else kept_here():
                outputs.append(linear.member(part, h_TD, adapters, dtype=dtype))
        return torch.cat(outputs, dim=-1), stream_TD

    def _norm_again(
        self, h_TD: Tensor, stream_TD: Tensor, weight_D: Tensor, z: NormNoise | None
    ) -> AbstractContextManager[object]:
        """Where ``h_TD`` would be kept: norm the stream again, which the norm keeps anyway."""
        again = partial(rms_norm, stream_TD.detach(), weight_D.detach(), self.spec.rms_eps, z, dtype=self.dtype)
        return made_again(h_TD, again)

    def head_norms(self, noise: NoisePass | None) -> HeadNorms | None:
        """Norms over each head of q and of k, with their noise; None where the model has none."""
        if self.q_norm is None or self.k_norm is None:
            return None
        q_noise, k_noise = (None if noise is None else noise.of_norm(self.index, site) for site in ("q_norm", "k_norm"))
        return HeadNorms(
            q_weight_d=self.q_norm, k_weight_d=self.k_norm, eps=self.spec.rms_eps, q_noise=q_noise, k_noise=k_noise
        )

    def _attention(
        self,
        qkv_TX: Tensor,
        rotation: tuple[Tensor, Tensor],
        context: AttentionContext,
        noise: NoisePass | None,
        adapters: bool,
    ) -> Tensor:
        spec = self.spec
        rotary = Rotary(
            cos_Td=rotation[0],
            sin_Td=rotation[1],
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            norms=self.head_norms(noise),
            bias=self.head_bias,
            dtype=self.attention_dtype,
            output_dtype=self.dtype,
        )
        o_THd = context.attend(self.index, qkv_TX, rotary)
        return self.o.stacked(o_THd.reshape(len(qkv_TX), spec.q_size), adapters, dtype=self.stream_dtype)


class Decoder(nn.Module):
    """A decoder-only language model with a frozen base, or one whose every weight learns (``full``).

    Built by ``qerl.model.checkpoint.load_model`` on its device and in its compute type, where it stays.

    Attributes:
        spec: shapes and switches.
        full: whether the weights themselves learn: linear layers and biases, all norms, embedding and head. Otherwise
            adapters and, if asked for, the layer norms do.
        embed_tokens: [V, D] in compute type.
        layers: ``DecoderLayer`` modules.
        final_norm: float32 [D].
        lm_head: [V, D] in compute type; None when it is the embedding itself (tied) or packed.
        packed_head: the head packed in another format; a copy of its own also where the embedding is tied.
        dense_head: dequantized copy of ``packed_head`` that products read instead, where memory allows.
    """

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(
        self,
        spec: ModelSpec,
        *,
        embed_tokens: Tensor,
        layers: Sequence[DecoderLayer],
        final_norm: Tensor,
        lm_head: Tensor | PackedWeight | None = None,
        dense_head: Tensor | None = None,
        keep_reference_norms: bool = False,
        full: bool = False,
    ):
        super().__init__()
        assert lm_head is not None or spec.tie_embeddings
        assert not full or not isinstance(lm_head, PackedWeight)
        self.spec = spec
        self.full = full
        self.embed_tokens = nn.Parameter(embed_tokens, requires_grad=full)
        self.layers = nn.ModuleList(layers)
        self.final_norm = nn.Parameter(final_norm, requires_grad=full)
        self.packed_head = lm_head if isinstance(lm_head, PackedWeight) else None
        self.dense_head = dense_head
        self.lm_head = nn.Parameter(lm_head, requires_grad=full) if isinstance(lm_head, Tensor) else None
        cos_Pd, sin_Pd = rotation_table(spec.rope, spec.head_dim, spec.max_positions, device=embed_tokens.device)
        self.register_buffer("rope_cos", cos_Pd, persistent=False)
        self.register_buffer("rope_sin", sin_Pd, persistent=False)
        for layer in layers:
            if layer.qkv.bias_apart:
                layer.head_bias = head_bias(layer.qkv.bias_O, spec, (cos_Pd, sin_Pd))
        if keep_reference_norms:
            for layer in layers:
                layer.reference_norms = {site: getattr(layer, site).detach().clone() for site in LAYER_NORMS}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Decoder:
        raise AssertionError("a Decoder stays on its device and in its type: pass device and dtype to load_model")

    @property
    def dtype(self) -> torch.dtype:
        """Compute type."""
        return self.embed_tokens.dtype

    @property
    def attention_dtype(self) -> torch.dtype:
        """Type of q, k and v, and of what attention multiplies."""
        first = self.layers[0]
        assert isinstance(first, DecoderLayer)
        return first.attention_dtype

    @property
    def device(self) -> torch.device:
        """Device of all weights."""
        return self.embed_tokens.device

    @property
    def head_weight(self) -> Head:
        """LM head [V, D], as the kernels take it: dense in compute type, or packed."""
        if self.packed_head is not None:
            return self.packed_head if self.dense_head is None else self.dense_head
        return self.embed_tokens if self.lm_head is None else self.lm_head

    def forward(
        self,
        tokens_T: Tensor,
        context: AttentionContext,
        *,
        noise: NoiseSource | None = None,
        adapters: bool = True,
        reference: bool = False,
        checkpointing: Checkpointing = "none",
        offload: bool = False,
    ) -> Tensor:
        """Hidden states after the final norm, [T, D] in compute type.

        Args:
            tokens_T: int64 [T].
            context: positions of the tokens and how they attend.
            noise: z to add to the norm scales. Where it differs between samples, ``context.samples`` says whose the tokens
                are.
            adapters: False leaves the adapters out.
            reference: use the layer norms that the model was loaded with (needs ``keep_reference_norms``). With
                ``adapters=False`` and no noise this is the reference policy.
            checkpointing: what the backward pass computes again (``qerl.model.recompute``).
            offload: with full checkpointing, keep the layer inputs in the host's memory.
        """
        x_TD = F.embedding(tokens_T, self.embed_tokens)
        rotation = self._rotation(context.positions_T)
        training = torch.is_grad_enabled()
        whole, selective = training and checkpointing == "full", training and checkpointing == "selective"
        seen = None if noise is None else noise.for_pass(context)
        call: tuple[Any, ...] = (rotation, context, seen, adapters, reference)
        stream_TD: Tensor | None = None
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            if whole:
                # One tensor a layer is kept, so the layer's output is added here and not by the next norm.
                with kept_on_host(x_TD.device) if offload else kept_here():
                    x_TD = checkpoint(
                        FirstAndAgain(layer.whole), x_TD, *call, use_reentrant=False, preserve_rng_state=False
                    )
            else:
                x_TD, stream_TD = layer(x_TD, stream_TD, *call, selective)
        z = None if seen is None else seen.of_norm(self.spec.num_layers, "final_norm")
        return add_rms_norm(x_TD, stream_TD, self.final_norm, self.spec.rms_eps, z, dtype=self.dtype)[0]

    def norm_inputs(self, tokens_T: Tensor, context: AttentionContext) -> Iterator[tuple[int, str, Tensor]]:
        """(layer, norm, x [T, D]): what each layer norm reads in a pass with adapters and without noise, in order."""
        x_TD = F.embedding(tokens_T, self.embed_tokens)
        rotation = self._rotation(context.positions_T)
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            yield layer.index, "attn_norm", x_TD
            x_TD = layer.after_attention(x_TD, rotation, context, None)
            yield layer.index, "mlp_norm", x_TD
            x_TD = layer.after_mlp(x_TD, None)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """float32 logits [N, V] of hidden states [N, D]."""
        return head_logits(hidden_ND, self.head_weight)

    def norm_weight(self, layer: int, site: str) -> Tensor:
        """Clean scale of one norm, float32 [D] (``q_norm`` and ``k_norm``: [d]); the final norm is layer ``spec.num_layers``."""
        return self.final_norm if site == "final_norm" else getattr(self.layers[layer], site)

    def grouped_linears(self) -> Iterator[GroupedLinear]:
        """All linear layers, in the order in which they run."""
        for linear, _ in self.products():
            yield linear

    def products(self) -> Iterator[tuple[GroupedLinear, torch.dtype]]:
        """The same, each with the type of its output."""
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            yield from layer.products

    def refresh_adapters(self) -> None:
        """Bring the adapters that products read up to date with the masters, in place: before a captured graph is replayed."""
        adapters = (linear.lora for linear in self.grouped_linears() if linear.lora is not None)
        stale = [pair for lora in adapters for pair in lora.stale_copies(force=True)]
        if stale:
            # One call for all of them: hundreds of small ones would take the host longer than a decode step.
            torch._foreach_copy_([copy for copy, _ in stale], [master for _, master in stale])

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Name -> parameter of everything that learns: adapter matrices and, if trained, the layer norms; all there is in full
        mode."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    def _rotation(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Table rows of the given positions, [T, d] each."""
        return self.rope_cos.index_select(0, positions_T), self.rope_sin.index_select(0, positions_T)

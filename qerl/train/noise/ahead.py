"""What noise alone asks of a compiler, asked before the first step: a run begins without noise, and its first noisy step would wait for it.

Legend: T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import embedding

from qerl.config.schema import Config
from qerl.kernels.rms_norm import add_rms_norm
from qerl.model.aqn import NoisePass, noise_state
from qerl.model.attention import PackedSequences
from qerl.model.decoder import Decoder, DecoderLayer
from qerl.model.recompute import Checkpointing

TOKENS = (64, 2304)
"""Tokens of a pass: norms have one variant of few tokens, which decode steps have too, and one of many."""
_SEQUENCE = 32


def meet_noise(config: Config, model: Decoder, sizes: Sequence[int] = TOKENS) -> None:
    """Draw noise as the run's rollouts will, and send tokens of no meaning through the first two layers and the last norm, forward and backward.

    Nothing is kept: neither gradients nor draws. Nothing happens where the run has no noise.
    """
    if not config.aqn.enabled:
        return
    state = noise_state(
        config.aqn,
        seed=config.train.seed,
        rollout=0,
        completed=0,
        planned=config.planned_updates,
        group_size=config.rollout.group_size,
    )
    assert state is not None
    # What is measured or remembered changes numbers and no kernel.
    magnitude = "absolute" if state.magnitude == "absolute" else "relative"
    state = replace(state, sigma=1.0, magnitude=magnitude, mode="replace", history=())
    noise = state.materialize(model)
    ways: set[Checkpointing] = {"none", "full" if config.train.checkpointing in ("full", "auto") else "none"}
    for tokens in sizes:
        # No more than a pass has room for.
        starts = torch.arange(0, min(tokens, config.pass_tokens) + 1, _SEQUENCE, device=model.device)
        keys = torch.arange(len(starts) - 1, device=model.device)
        context = PackedSequences(starts, sample_keys_S=keys, prompt_lengths_S=torch.ones_like(keys))
        for way in sorted(ways):
            _pass(model, context, noise.for_pass(context), way)


def _pass(model: Decoder, context: PackedSequences, noise: NoisePass, way: Checkpointing) -> None:
    """Two layers and the last norm as `Decoder.forward` has them, and their gradients to the stream and the scales that learn."""
    layers = [layer for layer in model.layers[:2] if isinstance(layer, DecoderLayer)]
    scales = [layer.get_parameter(name) for layer in layers for name in ("attn_norm", "mlp_norm")]
    tokens_T = torch.zeros_like(context.positions_T)
    first_TD = embedding(tokens_T, model.embed_tokens.detach()).requires_grad_()
    rotation = tuple(table.index_select(0, context.positions_T) for table in (model.rope_cos, model.rope_sin))
    call = (rotation, context, noise, True, False)
    x_TD: Tensor = first_TD
    stream_TD: Tensor | None = None
    with torch.enable_grad():
        for layer in layers:
            if way == "full":
                x_TD = layer.whole(x_TD, *call, output=True)
            else:
                x_TD, stream_TD = layer(x_TD, stream_TD, *call)
        z = noise.of_norm(model.spec.num_layers, "final_norm")
        h_TD, _ = add_rms_norm(x_TD, stream_TD, model.final_norm, model.spec.rms_eps, z, dtype=model.dtype)
        wanted = [first_TD, *(scale for scale in scales if scale.requires_grad)]
        torch.autograd.grad(h_TD.float().sum(), wanted)

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
from qerl.train.noise.measure import draws_for

TOKENS = (64, 2304)
"""Tokens of a pass: norms have one variant of few tokens, which decode steps have too, and one of many."""
_SEQUENCE = 32


def meet_noise(config: Config, model: Decoder, sizes: Sequence[int] = TOKENS) -> None:
    """Draw noise as the run's rollouts will, and send tokens of no meaning through the first two layers and the last norm, forward and backward; and
    forward alone with a draw for each sample, as the calibration has it that a stage begins with.

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
    noise, measured = state.materialize(model), draws_for(state).materialize(model)
    ways: set[Checkpointing] = {"none", "full" if config.train.checkpointing in ("full", "auto") else "none"}
    for tokens in sizes:
        # No more than a pass has room for.
        starts = torch.arange(0, min(tokens, config.pass_tokens) + 1, _SEQUENCE, device=model.device)
        keys = torch.arange(len(starts) - 1, device=model.device)
        context = PackedSequences(starts, sample_keys_S=keys, prompt_lengths_S=torch.ones_like(keys))
        for way in sorted(ways):
            _pass(model, context, noise.for_pass(context), way)
        with torch.no_grad():
            _forward(model, context, measured.for_pass(context), "none", _first(model, context))


def _first(model: Decoder, context: PackedSequences) -> Tensor:
    """The stream [T, D] before the first layer."""
    return embedding(torch.zeros_like(context.positions_T), model.embed_tokens.detach())


def _pass(model: Decoder, context: PackedSequences, noise: NoisePass, way: Checkpointing) -> None:
    """Forward, and gradients to the stream and the scales that learn."""
    scales = [layer.get_parameter(name) for layer in model.layers[:2] for name in ("attn_norm", "mlp_norm")]
    first_TD = _first(model, context).requires_grad_()
    with torch.enable_grad():
        h_TD = _forward(model, context, noise, way, first_TD)
        torch.autograd.grad(h_TD.float().sum(), [first_TD, *(scale for scale in scales if scale.requires_grad)])


def _forward(model: Decoder, context: PackedSequences, noise: NoisePass, way: Checkpointing, x_TD: Tensor) -> Tensor:
    """Two layers and the last norm as `Decoder.forward` has them: [T, D]."""
    layers = [layer for layer in model.layers[:2] if isinstance(layer, DecoderLayer)]
    rotation = tuple(table.index_select(0, context.positions_T) for table in (model.rope_cos, model.rope_sin))
    call = (rotation, context, noise, True, False)
    stream_TD: Tensor | None = None
    for layer in layers:
        if way == "full":
            x_TD = layer.whole(x_TD, *call, output=True)
        else:
            x_TD, stream_TD = layer(x_TD, stream_TD, *call)
    z = noise.of_norm(model.spec.num_layers, "final_norm")
    return add_rms_norm(x_TD, stream_TD, model.final_norm, model.spec.rms_eps, z, dtype=model.dtype)[0]

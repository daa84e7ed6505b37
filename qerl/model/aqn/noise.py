"""``Noise``: the z of one rollout, and ``NoisePass``: what one forward pass sees of it.

Shape legend: T tokens of a pass, S samples (sequences) of a pass, D width of a norm.

With scope ``rollout`` z is one vector a place, drawn once. The other scopes draw for each pass, from the keys of its samples
(and the positions of its tokens), and keep nothing: engine and trainer draw the same numbers because the keys are the same. What the
tokens of a sample share is drawn at once for all places of a pass, when the first of them is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from qerl.kernels import philox
from qerl.kernels.rms_norm import KeyedNoise, NormNoise, TableNoise
from qerl.model.aqn.sites import LAYER_SHIFT, POSITION_SHIFT, SITE_IDS, NormSource, Place, clean_weight

if TYPE_CHECKING:
    from qerl.model.aqn.state import NoiseState
    from qerl.model.attention import AttentionContext, SampleRows


PASS_TABLE_BYTES = 1 << 28
"""Most memory of the draws that a pass holds for all its norms; of more, each norm draws its own."""

TABLE_ROWS = 64
"""Most rows of a GPU's decode batch whose draws of scopes ``group`` and ``response`` are kept from step to step; of more, each norm draws at every step."""

TABLE_BYTES = 2 << 30
"""Most memory of the draws of a decode batch that are kept from step to step; noise that needs more is drawn at every step."""


def keeps_tables(scope: str, rows: int, width: int, device_type: str) -> bool:
    """Whether decode steps read the noise from tables: draws outlast a step, and the tables are not too large. Of many rows
    a GPU's step takes so long that its draws count for little, and keys and values want the memory.

    Args:
        scope: of the noise.
        rows: of the decode batch.
        width: channels of all noisy places together.
        device_type: ``cpu`` or ``cuda``.
    """
    if scope not in ("group", "response"):
        return scope == "rollout"
    few = device_type == "cpu" or rows <= TABLE_ROWS
    return few and 4 * rows * width <= TABLE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter:
    """Key and counter words of the draws of one pass, as of ``KeyedNoise``, which all its places share."""

    key_2: Tensor
    c1_R: Tensor | None
    c2_R: Tensor
    c3_1: Tensor


class NoiseSource(Protocol):
    """Noise as an argument of a forward pass."""

    def for_pass(self, context: AttentionContext) -> NoisePass:
        """What the pass over the tokens of ``context`` sees."""
        ...


class Noise:
    """The noise of one rollout. Made by ``NoiseState.materialize``; an argument of the forward pass, never a mode.

    Args:
        state: its record.
        weights: clean scale of every noisy place: width and device.
        spreads: standard deviation of every place, a number or float32 [D].
        added: vectors that are added to the draws of scope ``rollout`` (earlier draws that accumulate).
    """

    def __init__(
        self,
        state: NoiseState,
        weights: Mapping[Place, Tensor],
        spreads: Mapping[Place, float | Tensor],
        *,
        added: Mapping[Place, Tensor] | None = None,
    ):
        self.state = state
        self.spreads = dict(spreads)
        self._spread_tensors: dict[Place, Tensor] = {}
        self._words: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._names: dict[tuple[int, torch.device], Tensor] = {}
        self.widths = {place: weight_D.numel() for place, weight_D in weights.items()}
        self.values: dict[Place, Tensor] = {}
        """Place -> z, float32 [D], in scope ``rollout``; empty in the others."""
        if state.scope == "rollout":
            for place, weight_D in weights.items():
                z_D = self._draw_one(place, weight_D.device)
                self.values[place] = added[place] + z_D if added else z_D

    @property
    def by_sample(self) -> bool:
        """A pass must know whose its tokens are: draws differ between samples, or prompts are clean."""
        return bool(self.spreads) and (self.state.scope != "rollout" or self.state.prompt == "clean")

    def z(self, layer: int, name: str) -> Tensor | None:
        """z of one place in scope ``rollout``, float32 [D]; None where there is no noise."""
        assert self.state.scope == "rollout" or not self.spreads, "a draw of this scope belongs to a pass: use for_pass"
        return self.values.get((layer, name))

    def places(self) -> tuple[Place, ...]:
        """The (layer, name) pairs that carry noise."""
        return tuple(self.spreads)

    def draw(self, place: Place, sample_keys_S: Tensor, positions_S: Tensor | None = None) -> Tensor:
        """z of one place for samples (and positions, in scope ``token``), float32 [S, D]; not for scope ``rollout``.

        Args:
            place: one of ``places()``.
            sample_keys_S: int64 [S].
            positions_S: int64 [S], absolute position of the token in its sequence.
        """
        state = self.state
        counter: Tensor | int = _name_word(place)
        if state.scope == "token":
            assert positions_S is not None
            counter = counter + (positions_S << POSITION_SHIFT)
        keys_S = sample_keys_S // state.group_size if state.scope == "group" else sample_keys_S
        unit_SD = philox.normal_rows(
            state.seed, state.stream, self.widths[place], c1=counter, c2=keys_S, c3=state.rollout
        )
        return unit_SD * self.spreads[place]

    def counter(self, samples: SampleRows, positions_T: Tensor) -> Counter:
        """The parts of the Philox counter that all places of a pass share; not for scope ``rollout``."""
        state, device = self.state, positions_T.device
        token = state.scope == "token"
        keys = samples.of_tokens(samples.keys_S) if token else samples.keys_S
        if device not in self._words:
            key = philox.stream_key(state.seed, state.stream)
            self._words[device] = torch.tensor(key, device=device), torch.tensor([state.rollout], device=device)
        key_2, rollout_1 = self._words[device]
        return Counter(
            key_2=key_2,
            c1_R=positions_T << POSITION_SHIFT if token else None,
            c2_R=keys // state.group_size if state.scope == "group" else keys,
            c3_1=rollout_1,
        )

    def draw_all(self, counter: Counter) -> dict[Place, Tensor]:
        """z of every place at the counters of some samples, float32 [S, D] each: one draw for all places of a width; not for scopes
        ``rollout`` and ``token``."""
        tables: dict[Place, Tensor] = {}
        samples, device = len(counter.c2_R), counter.c2_R.device
        for width in dict.fromkeys(self.widths[place] for place in self.places()):
            where = [place for place in self.places() if self.widths[place] == width]
            names_P = self.name_words(width, device)
            unit = philox.normal_rows_of(
                counter.key_2,
                width,
                c1=names_P.unsqueeze(1).expand(-1, samples).reshape(-1),
                c2=counter.c2_R.repeat(len(where)),
                c3=counter.c3_1,
            ).view(len(where), samples, width)
            spreads = torch.stack([self.spread_tensor(place, device) for place in where]).unsqueeze(1)
            tables |= dict(zip(where, (unit * spreads).unbind(), strict=True))
        return tables

    def spread_tensor(self, place: Place, device: torch.device) -> Tensor:
        """Standard deviation of a place on the device, float32 [1] or [D]; made once."""
        if place not in self._spread_tensors:
            spread = self.spreads[place]
            self._spread_tensors[place] = (
                spread if isinstance(spread, Tensor) else torch.tensor([spread], dtype=torch.float32, device=device)
            )
        return self._spread_tensors[place]

    def name_words(self, width: int, device: torch.device) -> Tensor:
        """The parts of the second counter word that say which place it is, of the places of a width, int64 [P]; made once."""
        if (width, device) not in self._names:
            words = [_name_word(place) for place in self.places() if self.widths[place] == width]
            self._names[width, device] = torch.tensor(words, device=device)
        return self._names[width, device]

    def only(self, place: Place) -> Noise:
        """The same noise at one place alone."""
        alone = Noise(self.state, {}, {})
        alone.spreads, alone.widths = {place: self.spreads[place]}, {place: self.widths[place]}
        if place in self.values:
            alone.values = {place: self.values[place]}
        return alone

    def prefix_key(self, sample_key: int) -> int:
        """Samples of one prompt with the same number see the same noise at its prompt positions: they can share its keys
        and values."""
        state = self.state
        if state.prompt == "clean" or state.scope == "rollout":
            return 0
        return state.scope_key(sample_key)

    def for_pass(self, context: AttentionContext) -> NoisePass:
        """What a pass over the tokens of ``context`` sees; ``context.samples`` must say whose they are, unless one draw
        serves all."""
        return NoisePass(self, context)

    def _draw_one(self, place: Place, device: torch.device) -> Tensor:
        unit_D = philox.normal(
            self.state.seed,
            self.state.stream,
            self.widths[place],
            c1=_name_word(place),
            c2=0,
            c3=self.state.rollout,
            device=device,
        )
        return unit_D * self.spreads[place]


class NoisePass:
    """z of one forward pass. Asking twice gives the same bits, so a layer may be computed again in the backward pass.

    Args:
        noise: the rollout's noise.
        context: the pass: positions of its tokens, and whose they are.
    """

    def __init__(self, noise: Noise, context: AttentionContext):
        self.noise = noise
        self.independent = noise.state.sharing == "independent"
        """Projections have draws of their own, named ``norm/projection``."""
        self.positions_T = context.positions_T
        self._samples: SampleRows | None = None
        self._noisy_T: Tensor | None = None
        self._counter: Counter | None = None
        self._tables: dict[Place, Tensor] = {}
        self._by_sample = noise.by_sample
        if self._by_sample:
            state = noise.state
            assert context.samples is not None, f"noise of scope {state.scope} needs to know whose tokens these are"
            self._samples = context.samples
            if state.prompt == "clean":
                self._noisy_T = self.positions_T >= context.samples.of_tokens(context.samples.prompt_lengths_S)

    def of_norm(self, layer: int, name: str) -> NormNoise | None:
        """Noise of one place as the kernels take it, with the values of ``z``."""
        place, noise = (layer, name), self.noise
        if not self._by_sample:
            return noise.values.get(place)
        if place not in noise.spreads:
            return None
        if noise.state.scope == "rollout":
            return TableNoise(z_RD=noise.values[place].unsqueeze(0), noisy_T=self._noisy_T)
        samples = self._samples
        assert samples is not None
        if self._counter is None:
            self._counter = self.counter(samples)
        counter, rows_T = self._counter, None if noise.state.scope == "token" else samples.sequence_T
        if rows_T is not None and 4 * len(counter.c2_R) * sum(noise.widths.values()) <= PASS_TABLE_BYTES:
            if not self._tables:
                self._tables = noise.draw_all(counter)
            return TableNoise(z_RD=self._tables[place], rows_T=rows_T, noisy_T=self._noisy_T)
        return KeyedNoise(
            key_2=counter.key_2,
            width=noise.widths[place],
            c1=_name_word(place),
            c1_R=counter.c1_R,
            c2_R=counter.c2_R,
            c3_1=counter.c3_1,
            spread=self.spread(place),
            rows_T=rows_T,
            noisy_T=self._noisy_T,
        )

    def counter(self, samples: SampleRows) -> Counter:
        """The parts of the Philox counter that all places share; not for scope ``rollout``."""
        return self.noise.counter(samples, self.positions_T)

    def spread(self, place: Place) -> Tensor:
        """Standard deviation of a place, float32 [1] or [D]."""
        return self.noise.spread_tensor(place, self.positions_T.device)

    def z(self, layer: int, name: str) -> Tensor | None:
        """z of one place, float32 [D] for all tokens or [T, D]; None where there is no noise (bit-identical to off)."""
        place = (layer, name)
        if not self._by_sample:
            return self.noise.values.get(place)
        if place not in self.noise.spreads:
            return None
        values = self.values(place)
        return values if self._noisy_T is None else values * self._noisy_T.unsqueeze(1).float()

    def values(self, place: Place) -> Tensor:
        """z of one place as if all positions were noisy, [D] or [T, D]."""
        if self.noise.state.scope == "rollout":
            return self.noise.values[place]
        samples = self._samples
        assert samples is not None
        if self.noise.state.scope == "token":
            return self.noise.draw(place, samples.of_tokens(samples.keys_S), self.positions_T)
        return samples.of_tokens(self.noise.draw(place, samples.keys_S))


def _name_word(place: Place) -> int:
    """The part of the second counter word that says which place it is."""
    layer, name = place
    return SITE_IDS[name] | layer << LAYER_SHIFT


def z_over_w(noise: Noise, model: NormSource, threshold: float) -> float:
    """Share of the channels that carry noise with |z / w| > ``threshold`` (a channel with w = 0 and z != 0 counts).

    In scope ``rollout`` of the one draw there is; in the others the expected share, 2 Phi(-threshold |w| / s) a channel with
    s the standard deviation of its z.
    """
    above, total = 0.0, 0
    for place in noise.places():
        weight_D = clean_weight(model, place).abs()
        if place in noise.values:
            above += float(torch.count_nonzero(noise.values[place].abs() > threshold * weight_D))
        else:
            spread_D = torch.as_tensor(noise.spreads[place], device=weight_D.device).double().expand_as(weight_D)
            tail_D = torch.erfc(threshold * weight_D.double() / spread_D / 2**0.5)
            above += float(torch.where(spread_D > 0, tail_D, 0.0).sum())
        total += weight_D.numel()
    return above / total if total else 0.0

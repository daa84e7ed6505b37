"""Adaptive quantization noise: h = u * (w + z), z ~ N(0, sigma^2) a channel, keyed and replayable.

In the order in which they are used:

* ``schedule``: stage and sigma by progress (pure numbers);
* ``sites``: where noise enters, and the layout of the Philox counter;
* ``state``: ``NoiseState``, the small record that, with the clean scales, says exactly which noise a rollout saw;
* ``noise``: ``Noise``, the same noise ready to be drawn, and ``NoisePass``, what one forward pass sees of it.

z is a function of (seed, stream, rollout, scope key, layer, place, position, channel) by a counter-based generator, so it
costs no storage, does not depend on who draws it or when, and is replayed in the training pass by drawing it again. It stays
float32 and apart from w: the clean scales are never written to. What has to be measured or remembered between rollouts
(calibration, controller, accumulated draws) is in ``qerl.train.noise``.
"""

from qerl.model.aqn.noise import Noise, NoisePass, NoiseSource, z_over_w
from qerl.model.aqn.schedule import sigma_for_stage, stage_at
from qerl.model.aqn.sites import NormSource, Place, clean_weight, places
from qerl.model.aqn.state import NoiseState, noise_state, stage_sigma

__all__ = [
    "Noise",
    "NoisePass",
    "NoiseSource",
    "NoiseState",
    "NormSource",
    "Place",
    "clean_weight",
    "noise_state",
    "places",
    "sigma_for_stage",
    "stage_at",
    "stage_sigma",
    "z_over_w",
]

"""The metrics of adaptive quantization noise, a part of ``metrics.catalogue``."""

from __future__ import annotations

from qerl.metrics.metric import Metric, section

AQN: tuple[Metric, ...] = section(
    "Adaptive quantization noise",
    (
        "aqn/sigma",
        "1",
        (
            "Noise level of this rollout: the standard deviation of z (`aqn.magnitude=absolute`), or of z over |w| (`relative`, `kl`; "
            "`sensitivity`: before the factor of the site). With `aqn.mode=accumulate` of this rollout's draw alone."
        ),
    ),
    ("aqn/stage", "1", "Stage of the noise schedule; stage 0 is noise-free."),
    (
        "aqn/z_over_w_above_half",
        "fraction",
        (
            "Noisy norm channels with |z| above half of |w|: large means the noise rewrites the layer. Of the draw with scope rollout, "
            "expected over draws with the other scopes."
        ),
    ),
    (
        "aqn/displacement",
        "1",
        "With `aqn.mode=accumulate`: standard deviation of the sum of all draws so far, the root of the sum of sigma^2.",
    ),
    ("aqn/kl_target", "nats", "With `aqn.magnitude=kl`: the schedule's KL(clean || noisy), a token."),
    (
        "aqn/kl",
        "nats",
        (
            "KL(clean || noisy) a token, full vocabulary, softmax(logits / T), over the answer tokens of the calibration batch and one "
            "draw an answer; in the first step of each noisy stage."
        ),
    ),
    ("aqn/entropy_clean", "nats", "Entropy of the clean policy over the same tokens; in the same steps."),
    ("aqn/entropy_change", "nats", "Entropy of the noisy policy minus that; in the same steps."),
    (
        "aqn/budget_factor",
        "1",
        "With `aqn.match_budget`: multiplier of sigma that gives independent draws the KL of shared ones.",
    ),
    (
        "aqn/sensitivity_scale/min",
        "1",
        "With `aqn.magnitude=sensitivity`: smallest factor of a site (before the cap their mean is 1).",
    ),
    ("aqn/sensitivity_scale/max", "1", "Largest factor of a site."),
    (
        "aqn/controller/active",
        "1",
        "1: the controller sets sigma of the next rollout; 0: the schedule does (stage 0, or signals were missing).",
    ),
    ("aqn/controller/sigma_schedule", "1", "Sigma that the fixed schedule would have had in this rollout."),
    (
        "aqn/controller/error",
        "1",
        "What the controller acts on, after this rollout: positive raises sigma. 0 inside the band of informative groups.",
    ),
    ("aqn/controller/informative", "fraction", "Smoothed share of groups with both correct and incorrect answers."),
    ("aqn/controller/entropy_ratio", "1", "Smoothed entropy over its mean in the noise-free stage 0."),
    ("aqn/controller/invalid", "fraction", "Smoothed share of unparsable and truncated answers."),
    (
        "aqn/controller/guard",
        "1",
        "What set the error: 0 informative groups, 1 too many invalid answers, 2 entropy too high, 3 entropy too low.",
    ),
)

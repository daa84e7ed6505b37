"""The rows of the catalogue for what ``qerl.train.diagnostics`` measures."""

from __future__ import annotations

from qerl.metrics.metric import Metric, section

AVERAGES = {"by_token": "mean over all tokens of the set", "by_answer": "mean over answers of each answer's mean"}

_ENTROPIES = (
    ("entropy_raw", "Entropy of softmax(logits), full support, adapters on, no noise"),
    ("entropy_tempered", "Entropy of softmax(logits / T), full support, no noise"),
    (
        "entropy_sampler",
        "Entropy after temperature, top-k, top-p and min-p, renormalized over the kept support, no noise",
    ),
    (
        "entropy_conditional",
        "E_z[H(O|z)]: entropy of softmax(logits / T), full support, under each noise draw, then the mean over draws",
    ),
    (
        "entropy_mixture",
        "H(O): entropy of softmax(logits / T) averaged over the noise draws first, full support, jackknife estimate",
    ),
    (
        "information",
        "I(O;Z) = mixture - conditional entropy: how much the noise draw changes the next token; 0 without noise, and may fall below 0 by its error",
    ),
)

_PROBE = section(
    "Entropy on the fixed probe set",
    *(
        (f"probe/{name}/{average}", "nats", f"{meaning}; {how}. On the probe set, before the updates of the step.")
        for name, meaning in _ENTROPIES
        for average, how in AVERAGES.items()
    ),
    (
        "answers/information_low",
        "nats",
        (
            "Lower bound of I(O;Z) for whole answers (their first `diagnostics.probe_tokens` tokens) of this rollout, in "
            "expectation; at most log(`diagnostics.noise_draws` + 1)."
        ),
    ),
    ("answers/information_high", "nats", "Upper bound of the same, in expectation."),
)

_CAUSES = (
    ("truncation", "sampler after top-k, top-p and min-p against the engine's full support; present when they are on"),
    ("kernel", "engine against trainer with the same noise and parameters: kernels, formats, cache and packing alone"),
    ("noise", "trainer with the rollout's noise against trainer without; present when there is noise"),
    (
        "staleness",
        "trainer before against trainer after the updates of the step, same noise: how old the answers have become",
    ),
)
_FIGURES = (
    ("kl", "nats", "KL a token, k3 estimate (truncation: mean of -log kept mass)"),
    ("max_abs_logp_difference", "nats", "Largest |difference of log-probs| of a chosen token"),
    ("mean_abs_prob_difference", "1", "Mean |difference of probabilities| of the chosen tokens"),
    ("effective_sample_size", "fraction", "(sum w)^2 / (n sum w^2), w the ratio of the two probabilities"),
)

_MISMATCH = section(
    "Mismatch by cause",
    *(
        (f"mismatch/{cause}/{name}", unit, f"{meaning}: {what}.")
        for cause, what in _CAUSES
        for name, unit, meaning in _FIGURES
    ),
    (
        "mismatch/kernel/drawn_differently",
        "fraction",
        (
            "Answer tokens in whose place the trainer, with the same noise and at the engine's own uniform number, draws another; present "
            "when top-k, top-p and min-p are off."
        ),
    ),
    (
        "mismatch/noise/drawn_differently",
        "fraction",
        (
            "Answer positions at which the trainer draws one token with the rollout's noise and another without, at the engine's uniform "
            "number: how often the noise changes what is explored; present when there is noise."
        ),
    ),
    (
        "mismatch/truncation/kept_mass",
        "fraction",
        "Mean probability that top-k, top-p and min-p leave; present when they are on.",
    ),
)

_ANSWERS = section(
    "Diversity and length of answers",
    (
        "answers/distinct",
        "answers",
        "Distinct parsable final answers of a group, mean over the groups that have any.",
    ),
    (
        "paths/distinct_correct",
        "paths",
        (
            "Distinct solution paths (sequences of normalized equations, else of numbers) among the correct answers of a group, "
            "mean over the groups that have any."
        ),
    ),
    (
        "paths/distinct_correct_share",
        "fraction",
        "Distinct correct paths over correct answers, summed over the groups.",
    ),
    (
        "reward_length/correlation",
        "1",
        "Pearson correlation of reward and answer length over the scored answers; absent when one does not vary.",
    ),
    (
        "reward_length/within_group",
        "1",
        "The same after subtracting each group's means: what the advantage sees, without easy prompts having short answers.",
    ),
    ("completions/mean_length_correct", "tokens", "Mean length of the correct answers."),
    ("completions/mean_length_incorrect", "tokens", "Mean length of the scored answers that are not correct."),
)

_PERTURBATION = section(
    "Output perturbations",
    (
        "perturbation/{projection}/relative",
        "1",
        (
            "Root mean square of the output change that the noise on the norm before it causes, over that of the output without "
            "bias; q, k, v, gate, up; on the probe set, upstream noise left out."
        ),
    ),
    (
        "perturbation/{pair}/dependence",
        "1",
        (
            "RV coefficient of the output changes of two projections (q_k, q_v, k_v, gate_up) over noise draws, |C_ab|^2 / "
            "(|C_aa| |C_bb|): shared draws tie them, with a draw for each projection it is 0 on average (an estimate: may be negative)."
        ),
    ),
)

_CANARY = section(
    "Adapter canary",
    (
        "canary/own/engine_difference",
        "nats",
        (
            "Mean |log-prob in the engine - in the trainer| of one of the step's own answers (at most 8 tokens in float32, 128 in bfloat16), under the "
            "policy and the noise that sampled it; above 1e-3 (bfloat16: 0.2), on many answers too, stops the run before the update."
        ),
    ),
    (
        "canary/own/{cause}_effect",
        "nats",
        (
            "Mean |change of log-probs| of that answer in the trainer when one thing is left out: the adapters, or the noise, where there is "
            "such. 0 in all answers, with adapters or noise that must show, stops the run."
        ),
    ),
    (
        "canary/own/{cause}_share",
        "fraction",
        (
            "Part of that change which the engine's log-probs make, where it is well above rounding: 1 in a sound run, 0 where the engine ignores the "
            "adapters or reads another noise key; below 0.5, on all answers too, stops the run."
        ),
    ),
    (
        "canary/adapter_size",
        "1",
        "Largest |alpha / rank * B| of all adapters after the updates of the step; 0 for fresh ones. After the first step, every tenth and the last.",
    ),
    (
        "canary/adapter_effect",
        "nats",
        "Mean |log-prob with - without adapters| of the canary's tokens in the trainer, after the first step and every tenth; 0 with adapters that are not zero stops the run.",
    ),
    (
        "canary/engine_difference",
        "nats",
        "Mean |log-prob in the engine - in the trainer| of the same tokens, adapters on, no noise; above 1e-3 (bfloat16: 0.2) stops the run, as the same of a step's own answers does (`sampling/sampling_logp_difference/mean`).",
    ),
)

DIAGNOSTICS: tuple[Metric, ...] = (*_PROBE, *_MISMATCH, *_ANSWERS, *_PERTURBATION, *_CANARY)
"""In the order of the documentation."""

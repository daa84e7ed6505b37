"""Metrics of the machinery: time by stage, throughput, memory."""

from __future__ import annotations

from qerl.metrics.metric import Metric, section

STAGES = (
    "switch",
    "rollout",
    "reward",
    "logprobs",
    "backward",
    "optimizer",
    "noise",
    "diagnostics",
    "evaluate",
    "save",
)
"""Stages that a step is divided into, none of which holds another; what is left of ``time/step`` is bookkeeping."""

_TIME = section(
    "Time",
    (
        "time/switch",
        "seconds",
        (
            "Changing over between engine and trainer: giving the memory of keys and values back before the updates and having it again before the "
            "rollout, where `rollout.keep_cache=off`. There is no cache to make invalid beside: the engine reads the trainer's tensors, and every rollout "
            "begins without a key or value of an older policy. Where captured steps cannot be kept, capturing them again is part of `time/rollout`."
        ),
    ),
    ("time/rollout", "seconds", "Generating the answers."),
    ("time/reward", "seconds", "Scoring them."),
    ("time/logprobs", "seconds", "Packing, and log-prob passes without gradient (recomputed denominator, reference)."),
    ("time/backward", "seconds", "Forward and backward passes of the loss."),
    ("time/optimizer", "seconds", "Gradient clipping and optimizer updates."),
    (
        "time/noise",
        "seconds",
        (
            "Drawing the noise of scope rollout, calibrating a stage, the controller, and checking that the clean scales are what they "
            "were. Draws of other scopes are part of the passes that see them."
        ),
    ),
    (
        "time/diagnostics",
        "seconds",
        "Measurements that learning does not need: probe set, mismatch by cause, output perturbations, canary.",
    ),
    ("time/evaluate", "seconds", "Held-out evaluation, where this step has one."),
    ("time/save", "seconds", "Writing records, adapters and checkpoints."),
    (
        "time/compile",
        "seconds",
        (
            "Of all these: compiling kernels (Triton, CUDA C++) that were met for the first time; about 0 in most steps. A step much longer than its "
            "neighbors has it here, if this is why."
        ),
    ),
    ("time/step", "seconds", "The step by the wall clock, without its evaluation and its checkpoint."),
    (
        "time/elapsed",
        "seconds",
        "Since the run began: set-up, steps, evaluations (this step's included) and saving; the time between a stop and a resume is not.",
    ),
    kind="timing",
)

_THROUGHPUT = section(
    "Throughput",
    ("tokens_per_second", "tokens/s", "Prompt and answer tokens of the step over `time/step`."),
    ("rollout/tokens_per_second", "tokens/s", "Answer tokens over `time/rollout`."),
    (
        "rollout/preemptions",
        "count",
        "Times that an answer was put back for want of pages of keys and values, and computed again as far as it was.",
    ),
    kind="throughput",
)

_MEMORY = section(
    "Memory",
    ("memory/rss_gb", "GB", "Peak resident memory of the process so far (1 GB = 1e9 bytes)."),
    ("memory/allocated_gb", "GB", "Peak of tensors allocated on the GPU so far."),
    ("memory/reserved_gb", "GB", "Peak of memory reserved on the GPU so far."),
    (
        "memory/{stage}/allocated_gb",
        "GB",
        "Peak of tensors allocated on the GPU in one stage of the step (those of `time/`).",
    ),
    ("memory/{stage}/reserved_gb", "GB", "Peak of memory reserved on the GPU in one stage of the step."),
    (
        "memory/larger_passes",
        "count",
        "Passes with a gradient so far that had more tokens than any before: unused memory was given back before each of them. On a GPU.",
    ),
    kind="memory",
)

MACHINE: tuple[Metric, ...] = (*_TIME, *_THROUGHPUT, *_MEMORY)
"""In the order of the documentation."""

"""Draws of a step with outcomes laid down beforehand."""

import dataclasses

from builders import group

from qerl.records import Outcome, PolicyState, Rollout, SamplingSpec

C, W, T, N = Outcome.CORRECT, Outcome.WRONG, Outcome.TRUNCATED, Outcome.UNSCORABLE
MIXED, RIGHT, WRONG, CUT, LOST = (C, W), (C, C), (W, W), (T, T), (N, N)
STATS = {"generated_tokens": 8.0, "prompt_tokens": 6.0, "seconds": 2.0, "kv_bytes": 5.0, "peak_rows": 4.0, "tokens_per_second": 4.0}  # fmt: skip


class Source:
    """Groups of the given outcomes in order, then groups that teach nothing; remembers what was asked of it."""

    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)
        self.calls = []

    def __call__(self, count, first_key):
        self.calls.append((count, first_key))
        taken = [self.outcomes.pop(0) if self.outcomes else WRONG for _ in range(count)]
        groups = [group(list(outcomes)) for outcomes in taken]
        completions = [
            dataclasses.replace(completion, sample_key=first_key + 2 * i + j)
            for i, made in enumerate(groups)
            for j, completion in enumerate(made.completions)
        ]
        groups = [
            dataclasses.replace(made, completions=tuple(completions[2 * i : 2 * i + 2]))
            for i, made in enumerate(groups)
        ]
        policy = PolicyState(policy_version=1, adapter_hash="a", norm_hash="n", base_format="bf16", base_hash="b", noise=None)  # fmt: skip
        rollout = Rollout(
            index=4, group_size=2, completions=tuple(completions), sampling=SamplingSpec(), policy=policy,
            engine="qerl", kernels={}, cache_state="empty", stats=dict(STATS),
        )  # fmt: skip
        return rollout, groups

"""Small records for the objective's tests."""

from qerl.records import Completion, Group, Outcome, Prompt, Score


def completion(prompt_length: int, logprobs: list[float], *, key: int = 0, stop_reason="stop") -> Completion:
    prompt = Prompt(id="p", question="q", answer="1", text="q", token_ids=tuple(range(1, prompt_length + 1)))
    return Completion(
        prompt=prompt,
        sample_key=key,
        token_ids=tuple(range(10, 10 + len(logprobs))),
        text="",
        behavior_logprobs=tuple(logprobs),
        sampler_logprobs=tuple(logprobs),
        stop_reason=stop_reason,
    )


def score(outcome: Outcome, reward: float | None = None) -> Score:
    value = reward if reward is not None else {Outcome.CORRECT: 1.0, Outcome.UNSCORABLE: None}.get(outcome, 0.0)
    return Score(reward=value, parts={"accuracy": value}, outcome=outcome, parsed=None)


def group(outcomes: list[Outcome], lengths: list[int] | None = None) -> Group:
    lengths = lengths or [2] * len(outcomes)
    completions = tuple(
        completion(3, [-0.5] * n, key=i, stop_reason="length" if o is Outcome.TRUNCATED else "stop")
        for i, (o, n) in enumerate(zip(outcomes, lengths, strict=True))
    )
    return Group(prompt=completions[0].prompt, completions=completions, scores=tuple(score(o) for o in outcomes))

"""Completions for reward and evaluation tests."""

from qerl.records import Completion, Prompt


def make_prompt(answer: str = "18", id: str = "p", **row: object) -> Prompt:
    return Prompt(
        id=id,
        question="How many?",
        answer=answer,
        text="<user>How many?<assistant>",
        token_ids=(1, 2, 3),
        row={"question": "How many?", "answer": answer, **row},
    )


def make_completion(
    text: str, answer: str = "18", *, tokens: int = 5, stop_reason: str = "stop", prompt: Prompt | None = None
) -> Completion:
    return Completion(
        prompt=prompt or make_prompt(answer),
        sample_key=0,
        token_ids=tuple(range(tokens)),
        text=text,
        behavior_logprobs=(0.0,) * tokens,
        sampler_logprobs=(0.0,) * tokens,
        stop_reason=stop_reason,
    )

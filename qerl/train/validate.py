"""Checks before a long run: what most often makes a run look alive and learn nothing.

Prompts as the model sees them, the tokens that end an answer, whether right answers score and wrong ones do not, and whether
the model ends an answer by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from qerl.config.schema import Config
from qerl.model.spec import ModelSpec
from qerl.model.tokenizer import Tokenizer
from qerl.records import Completion, Outcome, Prompt, SamplingSpec
from qerl.reward.compose import Rewarder
from qerl.reward.math_answer import reference_value
from qerl.train.fit import within_budget
from qerl.train.prompts import load_prompts
from qerl.train.run import check_trainable
from qerl.train.session import Session, fit_lengths, open_session, require_model_path
from qerl.train.warnings import prompt_warnings

SHOWN = 3
"""Prompts that are shown and answered."""
SCORED = 32
"""Reference answers that are scored."""
WRONG_ANSWER = "-987654321"
SHOWN_CHARACTERS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check with what it saw."""

    name: str
    passed: bool
    lines: tuple[str, ...]


def validate(config: Config) -> Iterator[Check]:
    """Run all checks on the base model (adapters and noise off), each when it is asked for. Writes nothing.

    Raises:
        QerlError: whatever would stop the run before its first step.
        DeviceMemoryError: a GPU's memory ran out.
    """
    check_trainable(config)
    config, length_notes = fit_lengths(config, ModelSpec.from_folder(require_model_path(config)))
    with within_budget(config):
        session, source = open_session(config, trainable=False), config.data.train
        prompts, dropped, notes = load_prompts(config, session.tokenizer, source, "train", None, training=True)
        yield check_prompts(config, prompts, [*length_notes, *notes], dropped)
        yield check_eos(session.tokenizer)
        yield check_rewards(config, prompts)
        yield check_stopping(config, session, prompts)


def check_prompts(config: Config, prompts: Sequence[Prompt], notes: Sequence[str], dropped: int) -> Check:
    """Rendered prompts, their number and lengths; fails where no chat template is around them."""
    bare = prompt_warnings(prompts, config.data.prompt_template)
    lengths = [len(prompt.token_ids) for prompt in prompts]
    lines = [f"{len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens, {dropped} left out as too long"]
    lines += [*notes, *bare]
    lines += [f"{prompt.id}: {prompt.text[:SHOWN_CHARACTERS]!r}" for prompt in prompts[:SHOWN]]
    return Check(name="prompts", passed=not bare, lines=tuple(lines))


def check_eos(tokenizer: Tokenizer) -> Check:
    """Every token that ends an answer."""
    names = tokenizer.inner.convert_ids_to_tokens(list(tokenizer.eos_ids))
    lines = [f"{token_id}: {name!r}" for token_id, name in zip(tokenizer.eos_ids, names, strict=True)]
    return Check(name="tokens that end an answer", passed=bool(lines), lines=tuple(lines))


def check_rewards(config: Config, prompts: Sequence[Prompt]) -> Check:
    """Reference answers, boxed, must be correct; a number that is nobody's answer must not."""
    chosen = prompts[:SCORED]
    gold = [_written(prompt, reference_value(prompt.answer), key) for key, prompt in enumerate(chosen)]
    wrong = [_written(prompt, WRONG_ANSWER, key) for key, prompt in enumerate(chosen)]
    with Rewarder(config.reward, config.rollout.max_new_tokens) as rewarder:
        scores = rewarder.score([*gold, *wrong])
        notes = rewarder.take_warnings()
    right, false = scores[: len(gold)], scores[len(gold) :]
    missed = [item for item, score in zip(gold, right, strict=True) if score.outcome is not Outcome.CORRECT]
    fooled = [item for item, score in zip(wrong, false, strict=True) if score.outcome is Outcome.CORRECT]
    lines = [
        f"{len(gold) - len(missed)} of {len(gold)} reference answers are correct (all must be)",
        f"{len(fooled)} of {len(wrong)} wrong answers are correct (none may be)",
        *notes,
    ]
    lines += [f"not correct: {item.prompt.id}: {item.text!r}" for item in missed[:SHOWN]]
    lines += [f"correct: {item.prompt.id}: {item.text!r} for {item.prompt.answer!r}" for item in fooled[:SHOWN]]
    return Check(name="rewards", passed=not missed and not fooled, lines=tuple(lines))


def check_stopping(config: Config, session: Session, prompts: Sequence[Prompt]) -> Check:
    """Greedy answers of the base model; at least one must end by itself."""
    sampling = SamplingSpec(temperature=0.0, max_new_tokens=config.rollout.max_new_tokens, seed=config.train.seed)
    completions, _ = session.engine.generate(prompts[:SHOWN], sampling, adapters=False)
    ended = sum(completion.stop_reason == "stop" for completion in completions)
    lines = [f"{ended} of {len(completions)} greedy answers end by themselves (at least one must)"]
    lines += [
        f"{item.prompt.id}: {len(item.token_ids)} tokens, {item.stop_reason}: {item.text[-SHOWN_CHARACTERS:]!r}"
        for item in completions
    ]
    if not ended:
        limit = config.rollout.max_new_tokens
        lines.append(
            f"raise rollout.max_new_tokens (now {limit}), or look whether the tokens above end this model's answers"
        )
    return Check(name="stopping", passed=ended > 0, lines=tuple(lines))


def _written(prompt: Prompt, answer: str, key: int) -> Completion:
    """An answer as if the model had written it."""
    return Completion(
        prompt=prompt,
        sample_key=key,
        token_ids=(0,),
        text=f"The answer is \\boxed{{{answer}}}.",
        behavior_logprobs=(0.0,),
        sampler_logprobs=(0.0,),
        stop_reason="stop",
    )

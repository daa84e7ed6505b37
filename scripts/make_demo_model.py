"""Pretrain the tiny model that the demo trains further: an ordinary Hugging Face folder of about 1 MB.

    python scripts/make_demo_model.py --out qerl/assets/demo_model

The model has the Qwen2 architecture (grouped-query attention, QKV bias, tied embeddings) and a byte-level BPE tokenizer
of its own. It learns from the ``train`` split of ``qerl.data.synthetic`` only, in chat form, and the loss covers the answers
alone. Of the answers, ``--direct-share`` give the bare result (``The answer is 47.``), which a model of this size mostly
gets wrong, and the others write the steps first, which it mostly gets right. So the finished model knows both ways
but prefers the poor one, and reinforcement learning has something to find: mainly, it selects the worked way.

An update takes 0.3 s on two idle cores of a server CPU, so the whole run about 13 minutes; ``--device cuda`` takes under
two. On cores that other programs use as well it is many times slower. Everything is seeded: the same seed on the same
machine and thread count gives the same weights. The model card with the measured accuracies is written into the folder.
Needs ``torch``, ``transformers`` and ``tokenizers``, and no network.
"""

import argparse
import json
import math
import random
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import pre_tokenizers, trainers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from qerl.data.synthetic import Problem, arithmetic_problems
from qerl.formats import dequantize, get_format

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

SAMPLED_PROBLEMS, GROUP_SIZE = 64, 8

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


# --------------------------------------------------------------------------------------------------- tokenizer


def build_tokenizer(problems: Iterable[Problem]) -> Qwen2Tokenizer:
    """A byte-level BPE tokenizer in the form of Qwen2's, with the merges of this small language only.

    ``transformers`` reads the tokenizer of every ``qwen2`` folder as Qwen2's byte-level BPE, whatever the folder says
    of its kind, so it must be one. It encodes any text and decodes it exactly; each word of the problems (with the
    space before it) is one token, each digit is one, and so is the space before a number.
    """
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained = Qwen2Tokenizer().backend_tokenizer
    texts = [f"{problem.question}\n{problem.solution}" for problem in problems]
    trained.train_from_iterator([*texts, "user\n", "assistant\n", "system\n"], trainer)
    model = json.loads(trained.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(pair) for pair in model["merges"]],
        eos_token=END,
        pad_token=PAD,
        unk_token=None,
        extra_special_tokens=[START],
        padding_side="left",
        model_max_length=256,
        chat_template=CHAT_TEMPLATE,
    )


# -------------------------------------------------------------------------------------------------------- data


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One training sequence: the rendered prompt and the answer with its end marker."""

    prompt_ids: list[int]
    answer_ids: list[int]


def make_examples(
    problems: Sequence[Problem], tokenizer: Qwen2Tokenizer, direct_share: float, rng: random.Random
) -> list[Example]:
    """Give each problem a direct answer with probability ``direct_share``, else the worked one."""
    examples = []
    for problem in problems:
        answer = problem.direct_solution if rng.random() < direct_share else problem.solution
        examples.append(
            Example(
                prompt_ids=tokenizer(render(tokenizer, problem), add_special_tokens=False)["input_ids"],
                answer_ids=tokenizer(answer + END, add_special_tokens=False)["input_ids"],
            )
        )
    return examples


def render(tokenizer: Qwen2Tokenizer, problem: Problem) -> str:
    """The prompt text: chat template with the generation prompt."""
    messages = [{"role": "user", "content": problem.question}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def batches(
    examples: Sequence[Example], batch_size: int, pad_id: int, rng: random.Random
) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Endless batches, reshuffled at every pass, each in two halves: the shorter and the longer sequences.

    The halves save padding; a half is (input ids, labels), both [rows, length], padded right, -100 where no loss falls.
    """
    order = list(range(len(examples)))
    while True:
        rng.shuffle(order)
        for start in range(0, len(order) - batch_size + 1, batch_size):
            chosen = [examples[i] for i in order[start : start + batch_size]]
            chosen.sort(key=lambda example: len(example.prompt_ids) + len(example.answer_ids))
            yield [pad(chosen[: batch_size // 2], pad_id), pad(chosen[batch_size // 2 :], pad_id)]


def pad(examples: Sequence[Example], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input ids and labels of ``examples`` as two tensors."""
    length = max(len(example.prompt_ids) + len(example.answer_ids) for example in examples)
    inputs = torch.full((len(examples), length), pad_id)
    labels = torch.full((len(examples), length), -100)
    for row, example in enumerate(examples):
        start, end = len(example.prompt_ids), len(example.prompt_ids) + len(example.answer_ids)
        inputs[row, :end] = torch.tensor(example.prompt_ids + example.answer_ids)
        labels[row, start:end] = torch.tensor(example.answer_ids)
    return inputs, labels


# ------------------------------------------------------------------------------------------------------- model


def build_model(tokenizer: Qwen2Tokenizer, width: int, layers: int) -> Qwen2ForCausalLM:
    """A Qwen2 of the given width (a multiple of 64): 4 query heads over 2 key/value heads, MLP three times as wide."""
    config = Qwen2Config(
        vocab_size=math.ceil(len(tokenizer) / 16) * 16,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
        initializer_range=0.04,
    )
    return Qwen2ForCausalLM(config)


def answer_loss(model: Qwen2ForCausalLM, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Summed cross-entropy of the answer tokens; logits are computed for these alone."""
    targets = labels[:, 1:]
    hidden = model.model(input_ids=inputs[:, :-1]).last_hidden_state
    return torch.nn.functional.cross_entropy(
        model.lm_head(hidden[targets >= 0]), targets[targets >= 0], reduction="sum"
    )


def backward(model: Qwen2ForCausalLM, halves: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Accumulate the gradient of the mean loss per answer token over both halves of a batch; returns the mean."""
    tokens = sum(int((labels >= 0).sum()) for _, labels in halves)
    total = 0.0
    for inputs, labels in halves:
        loss = answer_loss(model, inputs.to(model.device), labels.to(model.device)) / tokens
        loss.backward()
        total += loss.item()
    return total


def pretrain(model: Qwen2ForCausalLM, stream: Iterator[tuple], args: argparse.Namespace) -> float:
    """Train for ``args.steps`` updates; returns the mean loss of the last 100."""
    decayed = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.98))
    warmup = min(100, args.steps // 10 + 1)

    def rate(step: int) -> float:
        progress = max(0.0, (step - warmup) / max(1, args.steps - warmup))
        return min(1.0, (step + 1) / warmup) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    model.train()
    losses, started = [], time.monotonic()
    for step in range(args.steps):
        optimizer.zero_grad(set_to_none=True)
        losses.append(backward(model, next(stream)))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if (step + 1) % 200 == 0:
            seconds = time.monotonic() - started
            print(f"step {step + 1}/{args.steps}  loss {sum(losses[-200:]) / 200:.4f}  {seconds:.0f} s", flush=True)
    return sum(losses[-100:]) / len(losses[-100:])


# -------------------------------------------------------------------------------------------------- evaluation


@torch.no_grad()
def generate(model, tokenizer, prompts: Sequence[str], *, temperature: float, batch_size: int = 250) -> list[str]:
    """One answer text a prompt; greedy at temperature 0."""
    model.eval()
    texts: list[str] = []
    for start in range(0, len(prompts), batch_size):
        batch = tokenizer(
            prompts[start : start + batch_size], return_tensors="pt", padding=True, add_special_tokens=False
        ).to(model.device)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        output = model.generate(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=48, **sampling
        )
        texts += tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def is_correct(problem: Problem, text: str) -> bool:
    """Whether the last number of the answer is the right one."""
    numbers = re.findall(r"-?\d+", text)
    return bool(numbers) and numbers[-1] == problem.answer


def measure(model, tokenizer, problems: Sequence[Problem]) -> dict[str, float]:
    """Greedy and sampled accuracy, how often the model works, and how each way fares at temperature 1."""
    prompts = [render(tokenizer, problem) for problem in problems]
    greedy = generate(model, tokenizer, prompts, temperature=0)
    repeated = [problem for problem in problems[:SAMPLED_PROBLEMS] for _ in range(GROUP_SIZE)]
    sampled = generate(model, tokenizer, [render(tokenizer, problem) for problem in repeated], temperature=1.0)
    right = [is_correct(problem, text) for problem, text in zip(repeated, sampled, strict=True)]
    worked = ["=" in text for text in sampled]
    groups = [sum(right[i : i + GROUP_SIZE]) for i in range(0, len(right), GROUP_SIZE)]

    def mean(values: Iterable[float]) -> float:
        values = list(values)
        return sum(values) / len(values) if values else float("nan")

    return {
        "greedy_accuracy": mean(is_correct(p, t) for p, t in zip(problems, greedy, strict=True)),
        "greedy_worked_share": mean("=" in text for text in greedy),
        "sampled_accuracy": mean(right),
        "sampled_worked_share": mean(worked),
        "sampled_accuracy_worked": mean(r for r, w in zip(right, worked, strict=True) if w),
        "sampled_accuracy_direct": mean(r for r, w in zip(right, worked, strict=True) if not w),
        "sampled_mixed_groups": mean(0 < count < GROUP_SIZE for count in groups),
        "sampled_mean_tokens": mean(
            len(tokenizer(text, add_special_tokens=False)["input_ids"]) + 1 for text in sampled
        ),
    }


def nvfp4_copy(model: Qwen2ForCausalLM) -> Qwen2ForCausalLM:
    """The model with the seven projections of every layer rounded to nearest NVFP4."""
    copy = Qwen2ForCausalLM(model.config).to(model.device, model.dtype)
    copy.load_state_dict(model.state_dict())
    for module in copy.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = dequantize(get_format("nvfp4").quantize(module.weight.data))
    return copy


# ------------------------------------------------------------------------------------------------ model folder

CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---

# qerl demo model

A {parameters:,}-parameter causal language model of the Qwen2 architecture (width {width}, {layers} layers, 4 query and
2 key/value heads, tied embeddings, bfloat16) with a byte-level BPE tokenizer of its own. It answers arithmetic word problems of
two or three steps and does nothing else. It exists so that `make demo` has something to train in a minute.

Made by `python scripts/make_demo_model.py --seed {seed} --steps {steps} --device {device}` from the train split of
`qerl.data.synthetic`: {problems:,} problems, {steps} updates of {batch_size} sequences, {minutes:.0f} minutes on {hardware}.
A share of {direct_share} of the training answers gives the bare result, the others write the steps first:

    <|im_start|>user
    {question}<|im_end|>
    <|im_start|>assistant
    {solution}<|im_end|>

So the model knows both ways, prefers the bare one, and mostly gets that wrong. Reinforcement learning on the correctness of
the result mainly makes it select the worked way; it teaches little arithmetic that the model did not know.

Measured on {evaluated:,} problems of the test split, none of whose calculations occur in the train split (saved weights, computed
in float32, and the same with every projection of the decoder rounded to nearest NVFP4; sampling at temperature 1,
{samples:,} answers to {sampled_problems} problems):

| measure | as saved | NVFP4 |
| --- | --- | --- |
{table}

The share of mixed groups is that of groups of 8 answers with at least one right and one wrong. Licence: Apache-2.0.
"""


def write_card(folder: Path, model, tokenizer, args: argparse.Namespace, minutes: float) -> None:
    """Measure the saved model and write the folder's ``README.md``."""
    problems = arithmetic_problems("test", args.evaluated)
    saved, rounded = measure(model, tokenizer, problems), measure(nvfp4_copy(model), tokenizer, problems)
    rows = [f"| {name.replace('_', ' ')} | {value:.3g} | {rounded[name]:.3g} |" for name, value in saved.items()]
    example = problems[0]
    text = CARD.format(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        question=example.question,
        solution=example.solution,
        table="\n".join(rows),
        minutes=minutes,
        hardware=f"{args.threads} CPU threads" if args.device == "cpu" else "one GPU",
        samples=SAMPLED_PROBLEMS * GROUP_SIZE,
        sampled_problems=SAMPLED_PROBLEMS,
        **vars(args),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
    print("\n".join(rows))


def parse_arguments() -> argparse.Namespace:
    """The command line; the defaults make the model that ships."""
    parser = argparse.ArgumentParser(description="Pretrain the tiny demo model.")
    parser.add_argument("--out", type=Path, default=Path("qerl/assets/demo_model"), help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the problems and their order")
    parser.add_argument("--steps", type=int, default=2500, help="optimizer updates")
    parser.add_argument("--batch-size", type=int, default=128, help="sequences per update")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="peak, after 100 updates; cosine decay")
    parser.add_argument("--direct-share", type=float, default=0.6, help="share of answers without steps")
    parser.add_argument("--problems", type=int, default=80_000, help="training problems")
    parser.add_argument("--evaluated", type=int, default=1_000, help="held-out problems for the model card")
    parser.add_argument("--width", type=int, default=128, help="hidden size, a multiple of 64")
    parser.add_argument("--layers", type=int, default=2, help="decoder layers")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument(
        "--device", default="cpu", help="cpu or cuda; other devices give other roundings, so other weights"
    )
    return parser.parse_args()


def main() -> None:
    """Build the tokenizer, pretrain, save, measure what was saved."""
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng = random.Random(f"make_demo_model/{args.seed}")
    problems = arithmetic_problems("train", args.problems, args.seed)
    tokenizer = build_tokenizer(problems)
    examples = make_examples(problems, tokenizer, args.direct_share, rng)
    model = build_model(tokenizer, args.width, args.layers).to(args.device)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens, {len(examples):,} examples", flush=True)
    started = time.monotonic()
    pretrain(model, batches(examples, args.batch_size, tokenizer.pad_token_id, rng), args)
    minutes = (time.monotonic() - started) / 60
    args.out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out, save_jinja_files=False)
    (args.out / "model.safetensors").chmod(0o644)
    write_card(args.out, model.float(), tokenizer, args, minutes)


if __name__ == "__main__":
    main()

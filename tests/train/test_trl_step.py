"""One learning pass against a real ``GRPOTrainer`` of the installed TRL: same weights, same answers, same rewards.

TRL pads and runs transformers' model; ours packs, in several micro-batches, and runs the decoder. Compared are the
advantages, the importance weights, the loss, and the gradient of every norm scale that both train.
"""

import copy
import warnings

import pytest
import torch
from tiny_models import load_tiny, write_tiny

from qerl.config.load import load_config
from qerl.objective.advantage import advantages
from qerl.objective.batch import make_samples
from qerl.records import Completion, Group, Outcome, Prompt, Score
from qerl.train.learn import learn
from qerl.train.optimizer import MasterOptimizer
from qerl.train.timing import StageTimer

pytest.importorskip("trl", reason="the package trl is not installed: pip install trl")
pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's own, of its settings and of transformers' next version

GROUP, TEMPERATURE, MAX_NEW, EOS = 4, 0.8, 6, 2
PROMPT_LENGTHS, ANSWER_LENGTHS, CUT = (3, 5), (2, 5, 3, 6, 4, 4, 6, 3), (3, 6)
REWARDS = (1.0, 0.0, 0.25, 0.0, 1.0, 1.0, 0.0, 0.5)
CLIPS = {"gspo": ["objective.clip_low=0.02", "objective.clip_high=0.03"], "cispo": ["objective.clip_high=1.1"]}
TRL_NAMES = {"gspo": ("grpo", "sequence")}


class Recording(MasterOptimizer):
    """Keeps the gradients of an update and changes nothing."""

    def step(self, lr):
        self.gradients = [parameter.grad.clone() for parameter in self.parameters()]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return folder, write_tiny(folder, "llama-plain")


@pytest.fixture(scope="module")
def answers(checkpoint):
    """Prompts, answers (two of them cut), and log-probs near the model's as the sampler's record."""
    generator = torch.Generator().manual_seed(1)

    def tokens(count):
        return torch.randint(3, 96, (count,), generator=generator).tolist()

    prompts = [tokens(length) for length in PROMPT_LENGTHS]
    made = [tokens(n - 1) + ([EOS] if i not in CUT else tokens(1)) for i, n in enumerate(ANSWER_LENGTHS)]
    logprobs = []
    for i, answer in enumerate(made):
        text = torch.tensor([prompts[i // GROUP] + answer])
        with torch.no_grad():
            every = (checkpoint[1](text).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        exact = every[-len(answer) :].gather(1, text[0, -len(answer) :, None])[:, 0]
        logprobs.append((exact + 0.25 * torch.randn(len(answer), generator=generator)).tolist())
    return prompts, made, logprobs


def groups_of(answers):
    prompts, made, logprobs = answers
    completions = [
        Completion(
            prompt=Prompt(id=str(i // GROUP), question="", answer="", text="", token_ids=tuple(prompts[i // GROUP])),
            sample_key=i,
            token_ids=tuple(made[i]),
            text="",
            behavior_logprobs=tuple(logprobs[i]),
            sampler_logprobs=tuple(logprobs[i]),
            stop_reason="length" if i in CUT else "stop",
        )
        for i in range(len(made))
    ]
    scores = [Score(reward=reward, parts={}, outcome=Outcome.WRONG, parsed=None) for reward in REWARDS]
    return [
        Group(
            prompt=completions[i].prompt,
            completions=tuple(completions[i : i + GROUP]),
            scores=tuple(scores[i : i + GROUP]),
        )
        for i in range(0, len(made), GROUP)
    ]


def tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": EOS, **{f"w{i}": i for i in range(3, 96)}}
    made = Tokenizer(WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def trl_trainer(checkpoint, answers, folder, *, behavior, **settings):
    """TRL's trainer, told what was sampled. Without ``behavior`` its weights take the recorded log-probs into account."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    prompts, made, logprobs = answers
    arguments = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=len(made),
        num_generations=GROUP,
        max_completion_length=MAX_NEW,
        temperature=TEMPERATURE,
        scale_rewards="none",
        report_to=[],
        use_cpu=True,
        bf16=False,
        **settings,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = GRPOTrainer(
            model=copy.deepcopy(checkpoint[1]),
            reward_funcs=lambda completions, **columns: list(REWARDS),
            args=arguments,
            train_dataset=Dataset.from_list([{"prompt": "w3"}] * len(made)),
            processing_class=tokenizer(),
            rollout_func=lambda texts, trainer: {
                "prompt_ids": [prompts[i // GROUP] for i in range(len(made))],
                "completion_ids": made,
                "logprobs": logprobs,
            },
        )
    # Its correction acts on log-probs of vLLM; here they come from the rollout function.
    trainer.use_vllm = not behavior
    trainer._last_loaded_step = trainer.state.global_step
    trainer.state.num_input_tokens_seen = 0
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def trl_step(trainer, behavior):
    batch = trainer._generate_and_score_completions([{"prompt": "w3"}] * len(REWARDS))
    if behavior:
        batch["old_per_token_logps"] = batch["sampling_per_token_logps"]
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    layers = trainer.model.model.layers
    gradients = {f"layers.{i}.attn_norm": layer.input_layernorm.weight.grad for i, layer in enumerate(layers)}
    gradients |= {f"layers.{i}.mlp_norm": layer.post_attention_layernorm.weight.grad for i, layer in enumerate(layers)}
    return loss.item(), gradients, batch


def our_step(checkpoint, answers, kind, *settings):
    overrides = [
        f"objective.type={kind}", *CLIPS.get(kind, []), "objective.advantage=none", *settings,
        f"rollout.temperature={TEMPERATURE}", f"rollout.max_new_tokens={MAX_NEW}", "rollout.max_prompt_tokens=8",
        "train.token_budget=20", "optim.max_grad_norm=1e9",
    ]  # fmt: skip
    config = load_config(None, overrides)
    model = load_tiny(checkpoint[0], lora=config.lora, seed=0)
    parameters = {name: p for name, p in model.trainable_parameters().items() if "norm" in name}
    optimizer = Recording(parameters, config.optim)
    groups = groups_of(answers)
    values = advantages([[score.reward for score in group.scores] for group in groups], "none")
    samples = make_samples(groups, values, mask_truncated=config.objective.mask_truncated)
    stats = learn(config, model, optimizer, samples, noise=None, completed=0, timer=StageTimer())
    return stats.metrics(), dict(zip(parameters, optimizer.gradients, strict=True)), values


def compare(checkpoint, answers, folder, kind, ours, theirs, *, behavior):
    loss_type, level = TRL_NAMES.get(kind, (kind, "token"))
    clips = dict(zip(("epsilon", "epsilon_high"), {"gspo": (0.02, 0.03), "cispo": (0.2, 1.1)}.get(kind, (0.2, 0.28)), strict=True))  # fmt: skip
    trainer = trl_trainer(
        checkpoint, answers, folder, behavior=behavior, loss_type=loss_type, importance_sampling_level=level, **clips, **theirs
    )  # fmt: skip
    loss, gradients, batch = trl_step(trainer, behavior)
    metrics, mine, values = our_step(checkpoint, answers, kind, *ours)
    torch.testing.assert_close(torch.tensor(values).flatten(), batch["advantages"].cpu())
    # The value of cispo's loss holds log-probs of size 4; float32 sums in another order explain the rest.
    assert metrics["loss"] == pytest.approx(loss, rel=2e-4, abs=2e-6)
    for name, gradient in gradients.items():
        (found,) = [value for key, value in mine.items() if key.startswith(name)]
        torch.testing.assert_close(found, gradient, rtol=2e-4, atol=2e-6)
    assert max(gradient.abs().max() for gradient in gradients.values()) > 1e-3
    return metrics, batch


@pytest.mark.parametrize("kind", ["grpo", "dapo", "dr_grpo", "bnpo", "gspo", "cispo"])
def test_with_the_behavior_denominator(checkpoint, answers, tmp_path, kind):
    compare(checkpoint, answers, tmp_path, kind, ["objective.denominator=behavior"], {}, behavior=True)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_with_importance_weights(checkpoint, answers, tmp_path, level, mode):
    """TRL's own weights, from its own pass over the model, at bounds that catch some of them on either side."""
    low, high = 0.5, 1.4
    ours = ["denominator=recomputed", f"is_level={level}", f"is_mode={mode}", f"is_cap={high}", f"is_floor={low}"]
    theirs = {
        "vllm_importance_sampling_mode": f"{level}_{mode}",
        "vllm_importance_sampling_clip_min": low,
        "vllm_importance_sampling_clip_max": high,
    }
    overrides = [f"objective.{text}" for text in ours]
    metrics, batch = compare(checkpoint, answers, tmp_path, "dapo", overrides, theirs, behavior=False)
    ratio, mask = batch["importance_sampling_ratio"], batch["completion_mask"].bool()
    weights = ratio.flatten() if level == "sequence" else ratio[mask]
    bounds = (0.0,) if mode == "mask" else (low, high)
    assert metrics["importance_weight/mean"] == pytest.approx(weights.mean().item(), rel=1e-4)
    assert metrics["importance_weight/max"] == pytest.approx(weights.max().item(), rel=1e-4)
    affected = sum((weights == bound).float().mean().item() for bound in bounds)
    assert metrics["importance_weight/affected"] == pytest.approx(affected) and 0 < affected < 1


def test_with_truncated_answers_masked(checkpoint, answers, tmp_path):
    ours = ["objective.denominator=behavior", "objective.mask_truncated=true"]
    for kind in ("grpo", "dapo"):
        compare(checkpoint, answers, tmp_path, kind, ours, {"mask_truncated_completions": True}, behavior=True)

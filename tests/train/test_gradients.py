"""The gradient of a training step: that of PEFT and transformers, however the answers are packed and whatever is recomputed."""

from dataclasses import replace

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import PeftModel
from tiny_models import load_tiny, randomize_adapters, write_tiny

from qerl.config.load import load_config
from qerl.config.schema import LoraConfig, QuantConfig
from qerl.model.aqn import NoiseState
from qerl.model.checkpoint import save_adapter
from qerl.objective.batch import Sample
from qerl.records import Completion, Prompt
from qerl.train import learn as learn_module
from qerl.train.learn import learn, policy_logprobs
from qerl.train.optimizer import MasterOptimizer
from qerl.train.timing import StageTimer

LORA = LoraConfig(rank=4, alpha=6.0)
TEMPERATURE = 0.9
SHAPES = ((5, 9), (3, 4), (8, 1), (2, 12), (6, 6), (1, 3))
"""(prompt tokens, answer tokens) of each answer."""


class Recording(MasterOptimizer):
    """Keeps the gradients of the update and changes nothing."""

    def step(self, lr):
        self.gradients = {name: parameter.grad.clone() for name, parameter in self.trained.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, "qwen2-untied-theta")
    return path


@pytest.fixture(scope="module")
def model(folder):
    made = load_tiny(folder, lora=LORA)
    randomize_adapters(made)
    return made


def samples(shapes, seed=0):
    """Random answers with advantages of both signs; recorded log-probs are what the ratio is taken to."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count):
        return tuple(torch.randint(3, 96, (count,), generator=generator).tolist())

    made = []
    for key, (prompt_length, length) in enumerate(shapes):
        prompt = Prompt(id=str(key), question="", answer="", text="", token_ids=tokens(prompt_length))
        recorded = tuple((-4.6 + 0.3 * torch.randn(length, generator=generator)).tolist())
        completion = Completion(
            prompt=prompt, sample_key=key, token_ids=tokens(length), text="", stop_reason="stop",
            behavior_logprobs=recorded, sampler_logprobs=recorded,
        )  # fmt: skip
        made.append(Sample(completion=completion, advantage=float((-1) ** key) * (1 + key / 4), in_loss=True))
    return made


def our_gradients(model, groups, *overrides, noise=None):
    """(loss, gradients by name) of one mini-batch through ``learn``."""
    config = load_config(
        None,
        [
            "objective.type=dapo", f"rollout.temperature={TEMPERATURE}", "rollout.max_prompt_tokens=8",
            "rollout.max_new_tokens=12", "train.token_budget=4000", "optim.max_grad_norm=1e9", *overrides,
        ],
    )  # fmt: skip
    optimizer = Recording(model.trainable_parameters(), config.optim)
    stats = learn(config, model, optimizer, groups, noise=noise, completed=0, timer=StageTimer())
    for parameter in model.parameters():
        parameter.grad = None
    return stats.metrics()["loss"], optimizer.gradients


def assert_same(first, second, tolerance=2e-5):
    assert first.keys() == second.keys()
    for name, gradient in first.items():
        assert gradient.norm() > 0, name
        assert (gradient - second[name]).norm() <= tolerance * gradient.norm(), name


def clipped_surrogate(logits, answers, low=0.2, high=0.28):
    """DAPO's loss on padded logits, written out: token mean of -min(rho A, clip(rho) A)."""
    total, count = 0.0, 0
    for row, answer in zip(logits, answers, strict=True):
        start, length = len(answer.completion.prompt.token_ids), len(answer.completion.token_ids)
        logprobs = torch.log_softmax(row[start - 1 : start - 1 + length] / TEMPERATURE, dim=-1)
        chosen = logprobs.gather(1, torch.tensor(answer.completion.token_ids)[:, None])[:, 0]
        rho = torch.exp(chosen - torch.tensor(answer.completion.behavior_logprobs))
        advantage = answer.advantage
        total = total - torch.minimum(rho * advantage, rho.clamp(1 - low, 1 + high) * advantage).sum()
        count += length
    return total / count


def test_packed_gradients_are_those_of_peft_on_a_padded_batch(folder, model, tmp_path):
    answers = samples(SHAPES)
    loss, ours = our_gradients(model, [answers])
    save_adapter(model, tmp_path, base_path=str(folder), lora=LORA)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    peft_model = PeftModel.from_pretrained(base, tmp_path, is_trainable=True)
    rows = [torch.tensor(a.completion.prompt.token_ids + a.completion.token_ids) for a in answers]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    expected = clipped_surrogate(peft_model(input_ids=ids, attention_mask=mask).logits, answers)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    theirs = {name: parameter.grad for name, parameter in peft_model.named_parameters() if parameter.requires_grad}
    checked = 0
    for layer, module in enumerate(model.layers):
        for group in model.spec.groups():
            linear = getattr(module, group.attribute)
            prefix = f"layers.{layer}.{group.attribute}.lora"
            parts = ours[f"{prefix}.lora_a"].split(4)
            for index, part in enumerate(group.parts):
                name = f"base_model.model.model.layers.{layer}.{group.block}.{part}"
                for key, gradient in (("lora_A", parts[index]), ("lora_B", ours[f"{prefix}.lora_b.{index}"])):
                    reference = theirs[f"{name}.{key}.default.weight"]
                    assert reference.norm() > 0
                    assert (gradient - reference).norm() <= 3e-5 * reference.norm(), (name, key)
                    checked += 1
            assert linear.lora is not None
        for site, name in (("attn_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")):
            reference = theirs[f"base_model.model.model.layers.{layer}.{name}.modules_to_save.default.weight"]
            gradient = ours[f"layers.{layer}.{site}"]
            assert (gradient - reference).norm() <= 3e-5 * reference.norm(), name
            checked += 1
    assert checked == len(theirs)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 12)), min_size=2, max_size=6),
    budget=st.integers(20, 60),
    kind=st.sampled_from(["dapo", "dr_grpo", "bnpo", "grpo", "gspo"]),
    recompute=st.sampled_from(["none", "selective", "full"]),
)
def test_loss_and_gradients_do_not_depend_on_how_packing_fell(model, shapes, budget, kind, recompute):
    groups = [samples(shapes, seed=len(shapes))]
    whole_loss, whole = our_gradients(model, groups, f"objective.type={kind}", "train.checkpointing=none")
    loss, cut = our_gradients(
        model, groups, f"objective.type={kind}", f"train.token_budget={budget}", f"train.checkpointing={recompute}"
    )
    assert loss == pytest.approx(whole_loss, rel=1e-5, abs=1e-7)
    for name, gradient in whole.items():
        assert (gradient - cut[name]).norm() <= 3e-5 * gradient.norm() + 1e-9, name


@pytest.mark.parametrize("quant", [QuantConfig(), QuantConfig(dense_cache="off"), QuantConfig(format="nf4")])
@pytest.mark.parametrize(
    "recompute",
    [("train.checkpointing=selective",), ("train.checkpointing=full",), ("train.checkpointing=full", "train.activation_offloading=true")],
    ids=["selective", "full", "offloaded"],
)  # fmt: skip
def test_what_is_recomputed_does_not_change_the_gradient(folder, quant, recompute):
    model = load_tiny(folder, lora=LORA, quant=quant)
    randomize_adapters(model)
    groups = [samples(SHAPES)]
    _, kept = our_gradients(model, groups, "train.checkpointing=none")
    _, again = our_gradients(model, groups, *recompute)
    for name, gradient in kept.items():
        assert torch.equal(gradient, again[name]), name


def test_full_mode_gives_the_same_gradient_under_any_packing(folder):
    model = load_tiny(folder, full=True)
    full = ["train.mode=full", "quant.format=bf16"]
    groups = [samples(SHAPES)]
    whole_loss, whole = our_gradients(model, groups, *full)
    loss, cut = our_gradients(model, groups, *full, "train.token_budget=20", "train.checkpointing=full")
    assert loss == pytest.approx(whole_loss, rel=1e-5)
    assert_same(whole, cut)


GROUPS = ((5, (9, 4, 1)), (8, (12,)), (2, (6, 3, 7, 2)))
"""(prompt tokens, answer tokens of each answer) of each group."""


def grouped(seed=0):
    """Groups whose answers have one prompt."""
    made = []
    for index, (prompt_length, lengths) in enumerate(GROUPS):
        answers = samples([(prompt_length, n) for n in lengths], seed=seed + index)
        prompt = answers[0].completion.prompt
        keys = range(4 * index, 4 * index + len(answers))
        made.append(
            [
                replace(a, completion=replace(a.completion, prompt=prompt, sample_key=key))
                for a, key in zip(answers, keys, strict=True)
            ]
        )
    return made


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("budget", [4000, 30])
@pytest.mark.parametrize(
    "noise",
    [None, {"scope": "rollout"}, {"scope": "group"}, {"scope": "response", "prompt": "clean"}, {"scope": "response"}],
    ids=lambda noise: "-".join((noise or {"off": "off"}).values()),
)
def test_a_prompt_computed_once_for_its_group_gives_the_same_gradient(folder, recompute, budget, noise):
    model = load_tiny(folder, lora=LORA)
    randomize_adapters(model)
    seen = None
    if noise is not None:
        state = NoiseState(
            seed=0, rollout=1, stage=1, sigma=0.2, sites=("attn_norm", "mlp_norm"), group_size=4, **noise
        )
        seen = state.materialize(model)
    settings = (f"train.checkpointing={recompute}", f"train.token_budget={budget}", "objective.denominator=recomputed")
    loss, apart = our_gradients(model, grouped(), *settings, "train.share_prompts=false", noise=seen)
    shared_loss, shared = our_gradients(model, grouped(), *settings, "train.share_prompts=true", noise=seen)
    assert shared_loss == pytest.approx(loss, rel=1e-5)
    assert_same(apart, shared)


def with_advantages(groups, change):
    """The same answers with other advantages: ``change`` of group and answer index, None to leave one as it is."""
    return [
        [
            answer if (value := change(i, j)) is None else replace(answer, advantage=value)
            for j, answer in enumerate(group)
        ]
        for i, group in enumerate(groups)
    ]


@pytest.mark.parametrize("kind", ["dapo", "grpo", "gspo", "cispo"])
@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_answers_without_a_gradient_are_scored_and_not_learned_from(folder, monkeypatch, kind, kl):
    """A group of equal rewards and an answer out of the loss, against advantages too small to count."""
    model = load_tiny(folder, lora=LORA, keep_reference_norms=True)
    randomize_adapters(model)
    passes = []

    def recorded(model, batch, *arguments, reference=False, **keywords):
        if not reference:
            passes.append((torch.is_grad_enabled(), batch.sample_keys_S.tolist()))
        return policy_logprobs(model, batch, *arguments, reference=reference, **keywords)

    monkeypatch.setattr(learn_module, "policy_logprobs", recorded)
    groups = grouped()
    groups[0][1] = replace(groups[0][1], in_loss=False)
    settings = (f"objective.type={kind}", f"objective.kl_coef={kl}")
    loss, found = our_gradients(model, with_advantages(groups, lambda i, j: 0.0 if i == 2 else None), *settings)
    assert passes == ([(True, [0, 2, 4]), (False, [1, 8, 9, 10, 11])] if kl == 0 else [(True, [0, 2, 4, 8, 9, 10, 11]), (False, [1])])  # fmt: skip
    whole_loss, whole = our_gradients(model, with_advantages(groups, lambda i, j: 1e-25 if i == 2 else None), *settings)
    assert loss == pytest.approx(whole_loss, rel=1e-5, abs=1e-8)
    assert_same(whole, found)


def test_a_mini_batch_without_a_gradient_is_an_update_by_zeros(folder):
    """Moments and weight decay go on, as after a gradient that is next to nothing."""
    results = []
    for last in (0.0, 1e-30):
        model = load_tiny(folder, lora=LORA)
        randomize_adapters(model)
        config = load_config(None, ["optim.lr=1e-2", "optim.weight_decay=0.1", "rollout.max_prompt_tokens=8", "rollout.max_new_tokens=12"])  # fmt: skip
        optimizer = MasterOptimizer(model.trainable_parameters(), config.optim)
        for groups in (grouped(), with_advantages(grouped(), lambda i, j, last=last: last)):
            stats = learn(config, model, optimizer, groups, noise=None, completed=0, timer=StageTimer())
        results.append(
            (stats.metrics(), {name: p.detach().clone() for name, p in model.trainable_parameters().items()})
        )
    (metrics, values), (expected, parameters) = results
    assert metrics["updates"] == 1 and metrics["grad_norm"] == 0.0
    for name in ("entropy", "ratio/mean", "clip_ratio/low_mean", "mismatch_kl"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-9)
    for name, value in values.items():
        torch.testing.assert_close(value, parameters[name], rtol=1e-6, atol=1e-8)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["qwen3-wide-heads", "qwen2-untied-theta"])
def test_on_a_gpu_shared_prompts_are_as_near_to_the_exact_gradient_as_prompts_apart(tmp_path, variant):
    """bfloat16 and its kernels against float32 on the CPU, over all parameters together."""
    write_tiny(tmp_path, variant)
    settings = ("objective.denominator=recomputed", "train.checkpointing=none")

    def gradients(device, dtype, *overrides):
        model = load_tiny(tmp_path, lora=LORA, device=device, dtype=dtype)
        randomize_adapters(model)
        groups = with_advantages(grouped(), lambda i, j: 0.0 if i == 1 else None)
        found = our_gradients(model, groups, *settings, *overrides)[1]
        return torch.cat([gradient.double().cpu().flatten() for gradient in found.values()])

    exact = gradients("cpu", torch.float32, "train.share_prompts=false")
    errors = [
        float((gradients("cuda", torch.bfloat16, f"train.share_prompts={choice}") - exact).norm() / exact.norm())
        for choice in ("false", "true")
    ]
    print(f"{variant}: relative error apart {errors[0]:.2e}, shared {errors[1]:.2e}")
    assert max(errors) < 0.1 and errors[1] < 1.3 * errors[0]

"""Greedy answers of real checkpoints against transformers' own generation, with plain weights and with quantized ones that transformers gets
dequantized (needs $QERL_MODELS)."""

import os
from pathlib import Path

import pytest
import torch
from rollout_builders import teacher_forced
from transformers import AutoModelForCausalLM

from qerl.config.schema import QuantConfig
from qerl.formats import dequantize
from qerl.model.checkpoint import load_model
from qerl.model.tokenizer import load_tokenizer
from qerl.records import Prompt, SamplingSpec
from qerl.rollout.engine import Engine

pytestmark = pytest.mark.slow

QUESTIONS = ("What is 2 + 3?", "Tom has 3 apples and buys 4 more. How many?", "Write a haiku about rain.")


def render_prompts(tokenizer):
    for question in QUESTIONS:
        text = tokenizer.render([{"role": "user", "content": question}])
        ids = tuple(tokenizer.encode(text))
        yield Prompt(id=question, question=question, answer="", text=text, token_ids=ids)


def give_dequantized(model, peer):
    for index, layer in enumerate(model.layers):
        for shape in model.spec.groups():
            linear = getattr(layer, shape.attribute)
            parts = dequantize(linear.weight, torch.float32).split(linear.sizes)
            for name, values in zip(shape.part_names(index), parts, strict=True):
                peer.get_parameter(f"model.{name}.weight").data.copy_(values)


@pytest.mark.parametrize("format", ["bf16", "nvfp4"])
@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct", "Qwen2.5-Coder-0.5B-Instruct"])
def test_greedy_answers_of_real_models_equal_transformers(name, format):
    folder = Path(os.environ.get("QERL_MODELS", "")) / name
    if not (folder / "config.json").is_file():
        pytest.skip(f"needs {name} under $QERL_MODELS")
    tokenizer = load_tokenizer(folder)
    model = load_model(folder, quant=QuantConfig(format=format), lora=None, dtype=torch.float32)
    prompts = list(render_prompts(tokenizer))
    completions, _ = Engine(model, tokenizer).generate(prompts, SamplingSpec(temperature=0.0, max_new_tokens=32))
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if format != "bf16":
        give_dequantized(model, peer)
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([prompt.token_ids])
        expected = peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=32,
            do_sample=False,
            repetition_penalty=1.0,
            eos_token_id=list(tokenizer.eos_ids),
        )
        assert list(completion.token_ids) == expected[0, len(prompt.token_ids) :].tolist()
        whole = teacher_forced(model, completion, 1.0)
        assert completion.behavior_logprobs == pytest.approx(whole.tolist(), abs=1e-4)

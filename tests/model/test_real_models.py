"""The two real checkpoints (folders under $QERL_MODELS): float32 logits against transformers."""

import os
from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import decoder_logits, load_tiny, transformers_logits

from qerl.model.checkpoint import resolve_model_path
from qerl.model.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow

NAMES = ("SmolLM2-135M-Instruct", "Qwen2.5-Coder-0.5B-Instruct")
QUESTION = "Natalia sold clips to 48 friends in April, and then half as many in May. How many did she sell in all?"
ANSWER = "In May she sold 48 / 2 = 24 clips, so in all she sold 48 + 24 = 72 clips. The answer is \\boxed{72}."


@pytest.fixture(params=NAMES)
def folder(request) -> Path:
    if not os.environ.get("QERL_MODELS"):
        pytest.skip("QERL_MODELS is not set")
    return resolve_model_path(request.param)


def test_float32_logits_equal_transformers(folder):
    tokenizer = load_tokenizer(folder)
    prompt = tokenizer.render([{"role": "user", "content": QUESTION}])
    texts = (prompt + ANSWER, prompt, "def add(a, b):\n    return a + b\n")
    sequences = [torch.tensor(tokenizer.encode(text)) for text in texts]
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = transformers_logits(reference, sequences)
    model = load_tiny(folder)
    alone = torch.cat([decoder_logits(model, [sequence]) for sequence in sequences])
    assert (alone - expected).abs().max() < 1e-4
    assert (decoder_logits(model, sequences) - expected).abs().max() < 1e-4


def test_tokenizer_and_template_are_the_folders_own(folder):
    tokenizer = load_tokenizer(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": QUESTION}]
    expected = theirs.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode(tokenizer.render(messages)) == expected
    assert theirs.convert_tokens_to_ids("<|im_end|>") in tokenizer.eos_ids

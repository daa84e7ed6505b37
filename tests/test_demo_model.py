"""The demo model shipped as package data: small, complete, and at one with the task it is meant for."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import qerl
from qerl.data.synthetic import arithmetic_problems

FOLDER = Path(qerl.__file__).parent / "assets" / "demo_model"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def texts():
    problems = arithmetic_problems("train", 100, seed=5) + arithmetic_problems("test", 100, seed=5)
    return [text for p in problems for text in (p.question, p.solution)]


def test_folder_is_complete_and_small():
    names = {path.name for path in FOLDER.iterdir()}
    assert names >= {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 8_000_000


def test_config_is_a_plain_qwen2_with_an_end_token_that_the_tokenizer_shares(tokenizer):
    config = json.loads((FOLDER / "config.json").read_text())
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    assert config["model_type"] == "qwen2"
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert config["eos_token_id"] == generation["eos_token_id"] == tokenizer.eos_token_id
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token_id == config["pad_token_id"] != tokenizer.eos_token_id
    assert len(tokenizer) <= config["vocab_size"]


def test_every_projection_can_be_cut_into_blocks_of_16_and_is_finite():
    tensors = load_file(FOLDER / "model.safetensors")
    projections = {name: tensor for name, tensor in tensors.items() if name.endswith("_proj.weight")}
    assert projections and len(projections) % 7 == 0
    for name, tensor in projections.items():
        assert tensor.shape[1] % 16 == 0, name
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_special_tokens_have_one_id_each():
    stored = json.loads((FOLDER / "tokenizer.json").read_text(encoding="utf-8"))
    added = {token["content"]: token["id"] for token in stored["added_tokens"]}
    assert added.keys() == {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
    assert all(stored["model"]["vocab"][token] == i for token, i in added.items())


def test_tokenizer_gives_back_every_text_exactly(tokenizer, texts):
    for text in [*texts, "Any text, even ünknown 語 words: 1,234.5!\n"]:
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_words_and_digits_of_the_task_are_single_tokens(tokenizer, texts):
    for text in texts:
        pieces = re.findall(r" ?[A-Za-z]+|.", text)
        assert len(tokenizer(text, add_special_tokens=False)["input_ids"]) == len(pieces), text


def test_chat_template_renders_with_generation_prompt(tokenizer):
    question = "Tom has 23 apples. He buys 4 bags of 6 apples. How many apples does he have now?"
    messages = [{"role": "user", "content": question}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert ids.count(tokenizer.eos_token_id) == 1
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 2


def test_model_answers_greedily_in_the_form_of_the_task(tokenizer):
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    problems = arithmetic_problems("test", 64)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": p.question}], tokenize=False, add_generation_prompt=True
        )
        for p in problems
    ]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.no_grad():
        output = model.generate(**batch, max_new_tokens=48, do_sample=False)
    answers = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    assert all(re.search(r"The answer is \d+\.$", answer) for answer in answers)
    right = sum(a.endswith(f" {p.answer}.") for a, p in zip(answers, problems, strict=True))
    assert 0 < right < len(problems) / 2, "the demo starts below 50 %"

"""The scripts that time other software: their protocol and what they make for it, and the whole TRL loop in toy size."""

import importlib.util
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import write_tiny

ANCHORS = Path(__file__).resolve().parents[1] / "benchmarks" / "anchors"


@pytest.fixture(scope="module")
def decode():
    return runpy.run_path(str(ANCHORS / "vllm_decode.py"))


def test_a_step_of_an_engine_is_timed_without_what_a_call_costs_by_itself(decode):
    """An engine whose calls take 50 ms, 2 a prompt and 4 a step; every third call is disturbed."""
    protocol, now, asked = decode["Protocol"](calls=5), [0.0], []

    def generate(prompts, new):
        asked.append((len(prompts), new))
        assert {len(prompt) for prompt in prompts} == {16} and max(max(prompt) for prompt in prompts) < 100
        now[0] += 0.050 + 0.002 * len(prompts) + 0.004 * new
        if len(asked) in (5, 11):
            now[0] += 0.3

    found = decode["step_ms"](generate, 8, protocol, 100, clock=lambda: now[0])
    assert found["ms_per_step"] == pytest.approx(4.0)
    assert found["ms_min_max"] == pytest.approx([4.0 - 300 / 160, 4.0])
    assert asked == [(8, 32), (8, 192)] * 6, "the first pair is not counted"


@pytest.mark.parametrize("variant", ["qwen2-tied", "qwen3-wide-heads"])
def test_the_adapter_of_an_anchor_is_one_that_peft_applies_everywhere(decode, tmp_path, variant):
    peft = pytest.importorskip("peft")
    model = write_tiny(tmp_path / "model", variant)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    decode["write_adapter"](tmp_path / "adapter", config, 4)
    tokens = torch.arange(3, 11)[None]
    with torch.no_grad():
        plain = model(tokens).logits
        adapted = peft.PeftModel.from_pretrained(
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model"), tmp_path / "adapter"
        )
        changed = adapted(tokens).logits
    assert (changed - plain).abs().max() > 1e-4
    layers = [module for module in adapted.modules() if isinstance(module, peft.tuners.lora.Linear)]
    assert len(layers) == 7 * config["num_hidden_layers"]
    assert all(layer.lora_B["default"].weight.abs().min() > 0 for layer in layers)


def test_what_is_missing_is_said_in_one_message(monkeypatch, capsys, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for script, names in (("vllm_decode", ("vllm==",)), ("trl_loop", ("trl==", "peft==", "vllm=="))):
        main = runpy.run_path(str(ANCHORS / f"{script}.py"))["main"]
        with pytest.raises(SystemExit) as ended:
            main([str(tmp_path)])
        assert ended.value.code == 2
        text = capsys.readouterr().err
        assert text.count("error:") == 1 and "a CUDA device" in text and all(name in text for name in names)


@pytest.mark.parametrize(
    ("script", "options", "words"),
    [
        ("vllm_decode", ["--sequences", "8,0"], "at least one sequence"),
        ("vllm_decode", ["--calls", "0"], "at least 1"),
        ("trl_loop", ["--micro-batch", "48"], "divides the 256 answers"),
        ("trl_loop", ["--steps", "1"], "not counted"),
    ],
)
def test_mistaken_options_are_refused(capsys, tmp_path, script, options, words):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ANCHORS / f"{script}.py"))["parse"]([str(tmp_path), *options])
    assert ended.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")
def test_the_loop_of_trl_runs_in_toy_size_on_the_task_of_the_recipe(tmp_path, monkeypatch):
    pytest.importorskip("trl")
    data = tmp_path / "train.jsonl"
    data.write_text(
        "".join(json.dumps({"question": f"What is {a} + 1?", "answer": str(a + 1)}) + "\n" for a in range(9))
    )
    loop, out = runpy.run_path(str(ANCHORS / "trl_loop.py")), tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["trl_loop.py"])
    demo = Path(__file__).resolve().parents[1] / "qerl" / "assets" / "demo_model"
    loop["main"]([str(demo), "--data", str(data), "--steps", "3", "--tiny", "--out", str(out)])
    found = json.loads(out.read_text())
    assert (
        len(found["steps"]) == 2
        and found["seconds_min_max"][0] <= found["seconds_per_step"] <= found["seconds_min_max"][1]
    )
    assert 0 < found["answer_tokens"] <= 4 and len(found["reward"]) == 3
    asked = found["settings"]
    assert (asked["loss_type"], asked["beta"], asked["num_generations"], asked["learning_rate"]) == (
        "dapo",
        0.0,
        8,
        2e-5,
    )
    # The whole protocol is one rollout of 32 prompts x 8 answers an update, whatever the passes.
    whole = loop["settings"](loop["parse"]([str(demo), "--micro-batch", "64"]), tmp_path)
    assert whole["per_device_train_batch_size"] * whole["gradient_accumulation_steps"] == 256
    assert whole["use_vllm"] and whole["max_completion_length"] == 512


def test_the_judge_of_the_loop_reads_answers_as_qerl_does():
    judge = runpy.run_path(str(ANCHORS / "trl_loop.py"))["Judge"](512)
    answers = ["so \\boxed{72}", "\\boxed{71}", "I think it is $72$."]
    try:
        found = judge([[{"content": text}] for text in answers], ["#### 72"] * 3, [[1], [1], [1]])
    finally:
        judge.close()
    assert found == [1.0, 0.0, 1.0]

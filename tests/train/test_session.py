"""What a session decides that no plan of training has decided."""

import json

import pytest
import torch

from qerl import memory
from qerl.config.load import load_config
from qerl.train import run, session, standalone, warnings
from qerl.train.target import resolve_target

SMALL = ("rollout.max_prompt_tokens=8", "rollout.max_new_tokens=6", "lora.rank=2")
SHAPES = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
"""Of a 0.5B."""


@pytest.mark.parametrize(("gigabytes", "choice"), [(15.6, "on"), (15.5, "off")])
def test_rollouts_and_evaluations_load_the_copies_that_pay(tmp_path, monkeypatch, gigabytes, choice):
    """A model that is not trained has no plan; what is kept of .716 GB of weights, a twentieth of 92 % of 15.56 GB, is decided for the device all the same."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES))
    monkeypatch.setattr(session, "resolve_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr("qerl.memory.budget.share_of", lambda device: 10**11)
    monkeypatch.setattr(session, "load_tokenizer", lambda path: None)

    def load_model(path, *, quant, **rest):
        raise StopIteration(quant.dense_cache)

    monkeypatch.setattr(session, "load_model", load_model)
    with pytest.raises(StopIteration, match=f"^{choice}$"):
        session.open_session(load_config(None, [f"train.memory_budget={gigabytes}", f"model.path={tmp_path}"]))


@pytest.mark.parametrize("most", [-1, 0])
def test_a_rollout_says_when_many_answers_were_computed_again(tmp_path, monkeypatch, most):
    """None is here, which is more than a bound below zero."""
    monkeypatch.setattr(warnings, "MANY_PREEMPTED", most)
    settings = ("rollout.max_prompt_tokens=48", *SMALL[1:], "data.train=arithmetic")
    target, said = resolve_target("demo", settings), []
    standalone.sample_target(target, samples=2, limit=3, out=tmp_path / "out", warn=said.append)
    assert [text for text in said if "put back" in text] == [text for text in said if "put back 0 times, of 6" in text]
    assert any("rollout.max_num_seqs" in text for text in said) == (most < 0)


@pytest.mark.parametrize(("chosen", "dtype"), [("compute", torch.bfloat16), ("float16", torch.float16)])
def test_the_type_of_attention_reaches_the_model_and_the_cache(chosen, dtype):
    settings = ("model.path=demo", "model.device=cpu", f"model.attention_dtype={chosen}")
    opened = session.open_session(load_config(None, [*SMALL, *settings]))
    assert {layer.attention_dtype for layer in opened.model.layers} == set(opened.engine.kv_dtypes) == {dtype}


@pytest.mark.parametrize("half", [False, True])
def test_products_are_compared_before_training_with_the_types_of_their_outputs(monkeypatch, half):
    """With a float32 stream those of o and down, with attention in float16 those of q, k and v too are not rounded."""
    settings = ("model.path=demo", "model.device=cpu", "model.stream_dtype=float32", "quant.dense_cache=off")
    choice = f"model.attention_dtype={'float16' if half else 'compute'}"
    opened, seen, gate = session.open_session(load_config(None, [*SMALL, *settings, choice])), {}, run.layout_gate

    def compared(weight, name, *, dtype, output_dtype, dense_OI):
        seen[name.rpartition(".")[2]] = dtype, output_dtype
        return gate(weight, name, dtype=dtype, output_dtype=output_dtype, dense_OI=dense_OI)

    monkeypatch.setattr(run, "layout_gate", compared)
    run.check_layout(opened)
    assert {types[0] for types in seen.values()} == {torch.bfloat16} and len(seen) == 4
    wide = {name for name, types in seen.items() if types[1] == torch.float32}
    assert wide == ({"qkv_proj", "o_proj", "down_proj"} if half else {"o_proj", "down_proj"}), seen


@pytest.mark.gpu
@pytest.mark.parametrize(("gigabytes", "choice"), [(8, "on"), (0.001, "off")])
def test_a_session_holds_the_copies_that_it_decided_on(gigabytes, choice):
    settings = ("model.path=demo", "model.device=cuda", "model.dtype=bfloat16", f"train.memory_budget={gigabytes}")
    opened = session.open_session(load_config(None, [*SMALL, *settings]))
    held = memory.measure_resident(opened.model)["dense_cache"]
    assert opened.config.quant.dense_cache == choice and (held > 0) == (choice == "on")
    ledger = memory.predict(opened.config, opened.model.spec, device_type="cuda")
    assert held == ledger.resident["dense_cache"]

"""The canary must stay silent in sound runs, and name the part that is broken in others."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rollout_builders import load_tiny, make_prompts, shift_adapters, write_checkpoint

from qerl.config.load import load_config
from qerl.errors import TrainingError
from qerl.model.tokenizer import load_tokenizer
from qerl.rollout.engine import Engine
from qerl.train.diagnostics import observer
from qerl.train.diagnostics.canary import Readings, adapter_size, check_canary, read_canary
from qerl.train.diagnostics.passes import answer_logprobs, pack_answers

PROMPT = make_prompts([6])[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.fixture
def model(folder):
    return load_tiny(folder)


def scorer(model, *, ignore_adapters=False):
    @torch.no_grad()
    def score(completion, adapters):
        (batch,) = pack_answers([completion], 256, model.device)
        return answer_logprobs(model, batch, 1.0, None, adapters=adapters and not ignore_adapters)

    return score


class RoundsKeysAndValues(Engine):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs, kv_format="fp8")


class IgnoresAdapters(Engine):
    def generate(self, *args, **kwargs):
        return super().generate(*args, **{**kwargs, "adapters": False})


def readings(model, folder, *, engine=Engine, engine_model=None, score=None):
    built = engine(engine_model or model, load_tokenizer(folder))
    return read_canary(model, built, score or scorer(model), PROMPT, temperature=1.0, seed=0, step=1)


def test_a_sound_run_passes_and_shows_how_far_adapters_moved_it(model, folder):
    found = readings(model, folder)
    check_canary(found, torch.float32)
    assert found.adapter_effect > 1e-3 and found.engine_difference < 1e-5 and found.engine_moved
    assert found.adapter_size == pytest.approx(adapter_size(model)) and found.adapter_size > 0.1


def test_rounded_keys_and_values_are_told_from_a_fault(model, folder):
    found = readings(model, folder, engine=RoundsKeysAndValues)
    assert 1e-3 < found.engine_difference < 0.1
    check_canary(found, torch.float32, "fp8")
    with pytest.raises(TrainingError, match="engine and trainer disagree"):
        check_canary(found, torch.float32)


def test_a_disagreement_names_the_format_of_keys_and_values():
    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        with pytest.raises(TrainingError) as caught:
            check_canary(sound(engine_difference=0.3), dtype, "fp8_values")
        assert f"at most 0.2 in {name} with rollout.kv_format=fp8_values" in str(caught.value)
        assert "Try rollout.kv_format=compute" in str(caught.value)
    with pytest.raises(TrainingError) as caught:
        check_canary(sound(engine_difference=0.3), torch.bfloat16)
    assert "kv_format" not in str(caught.value)


def test_fresh_adapters_may_change_nothing(folder):
    model = load_tiny(folder, adapters=True)
    shift_adapters(model, -0.1)
    found = readings(model, folder)
    assert found.adapter_size == pytest.approx(0.0, abs=1e-8)
    check_canary(found, torch.float32)


def test_an_engine_that_ignores_the_adapters_is_named(model, folder):
    with pytest.raises(TrainingError, match="the engine ignores the adapters"):
        check_canary(readings(model, folder, engine=IgnoresAdapters), torch.float32)


def test_an_engine_with_old_adapters_is_found_out(model, folder):
    old = copy.deepcopy(model)
    shift_adapters(model, 0.1)
    with pytest.raises(TrainingError, match="engine and trainer disagree"):
        check_canary(readings(model, folder, engine_model=old), torch.float32)


def test_a_trainer_that_ignores_the_adapters_is_named(model, folder):
    with pytest.raises(TrainingError, match="trainer's log-probs do not change"):
        check_canary(readings(model, folder, score=scorer(model, ignore_adapters=True)), torch.float32)


def sound(**changes):
    values = {
        "adapter_size": 0.01,
        "adapter_effect": 0.1,
        "engine_difference": 1e-6,
        "engine_moved": True,
        "telling": True,
    }
    return Readings(**{**values, **changes})


def test_tokens_that_are_certain_prove_nothing():
    check_canary(sound(adapter_effect=0.0, engine_moved=False, telling=False), torch.float32)


def test_adapters_below_the_resolution_of_bfloat16_prove_nothing_there():
    silent = sound(adapter_size=1e-5, adapter_effect=0.0, engine_moved=False)
    check_canary(silent, torch.bfloat16)
    with pytest.raises(TrainingError):
        check_canary(silent, torch.float32)


def test_log_probs_that_are_not_numbers_are_a_disagreement():
    with pytest.raises(TrainingError, match="disagree"):
        check_canary(sound(engine_difference=float("nan")), torch.float32)


def test_bfloat16_may_differ_more_than_float32():
    check_canary(sound(engine_difference=0.05), torch.bfloat16)
    with pytest.raises(TrainingError, match=r"at most 0\.001 in float32"):
        check_canary(sound(engine_difference=0.05), torch.float32)


def test_when_a_prompt_is_answered_and_when_also_without_adapters(model, folder, monkeypatch):
    found = readings(model, folder)
    engine = Engine(model, load_tokenizer(folder))
    without = read_canary(model, engine, scorer(model), PROMPT, temperature=1.0, seed=0, step=1, without=False)
    assert without.engine_difference == found.engine_difference and without.adapter_size == found.adapter_size
    assert without.metrics().keys() == {"canary/adapter_size", "canary/engine_difference"}
    check_canary(without, torch.float32)
    with pytest.raises(TrainingError, match="disagree"):
        check_canary(replace(without, engine_difference=1.0), torch.float32)
    asked = {}

    def read(*args, step, without, **kwargs):
        asked[step] = without
        return sound()

    monkeypatch.setattr(observer, "read_canary", read)
    config = load_config(None, ["diagnostics.every=0", "train.steps=13"])
    watching = observer.Diagnostics(config, None, SimpleNamespace(model=model, engine=engine), [PROMPT])
    for step in range(1, 14):
        watching.after_updates(step, None)
    assert asked == {1: True, 10: True, 13: False}
    asked.clear()
    for step in range(1, 14):
        watching.after_updates(step, float("nan") if step == 5 else 1e-6)
    assert asked == {1: True, 10: True, 13: False}
    with pytest.raises(TrainingError, match="engine and trainer disagree"):
        watching.after_updates(3, 0.01)

import json

import pytest

from qerl.config.load import load_config
from qerl.errors import CheckpointError, ConfigError
from qerl.train.resume import STATE_VERSION, TrainState, adopt_plan, check_same_config, read_state


def test_settings_that_make_the_run_must_not_change():
    before = load_config(None, ["optim.lr=1e-5", "train.steps=10"])
    with pytest.raises(ConfigError, match=r"optim\.lr: 1e-05 -> 2e-05.*train\.steps: 10 -> 9"):
        check_same_config(before, load_config(None, ["optim.lr=2e-5", "train.steps=9"]))


def test_a_run_may_become_longer():
    check_same_config(load_config(None, ["train.steps=10"]), load_config(None, ["train.steps=20"]))


def test_settings_of_the_surroundings_may_change():
    before = load_config(None, ["model.path=a", "train.save_every=5"])
    check_same_config(before, load_config(None, ["model.path=b", "train.save_every=7", "log.progress=off"]))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"step": 1}', '{"version": 99}', json.dumps({"version": STATE_VERSION, "unknown": 3})]
)
def test_a_damaged_state_is_an_error_that_names_the_file(tmp_path, text):
    (tmp_path / "trainer_state.json").write_text(text)
    with pytest.raises(CheckpointError):
        read_state(tmp_path)


def test_state_that_was_never_written_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"trainer_state\.json"):
        read_state(tmp_path)


def test_a_fresh_state_starts_at_zero():
    assert (TrainState().step, TrainState().updates, TrainState().tokens) == (0, 0, 0)


def test_what_the_plan_decided_stays_with_the_run():
    saved = load_config(
        None,
        ["train.token_budget=20000", "train.checkpointing=selective", "rollout.keep_cache=off", "quant.dense_cache=on"],
    )
    open_again = load_config(None, ["train.token_budget=auto"])
    check_same_config(saved, open_again)
    adopted = adopt_plan(saved, open_again)
    assert adopted == saved
    fixed = adopt_plan(saved, load_config(None, ["train.token_budget=auto", "train.checkpointing=full"]))
    assert (fixed.train.token_budget, fixed.train.checkpointing) == (20000, "full")
    undecided = load_config(None, ["quant.dense_cache=auto", "train.token_budget=20000"])
    check_same_config(undecided, load_config(None, ["quant.dense_cache=on", "train.token_budget=20000"]))
    with pytest.raises(ConfigError, match=r"train\.token_budget: 20000 -> 16384"):
        check_same_config(saved, load_config(None, []))

"""Each known failure pattern, as a synthetic history of metrics, gives its warning and no other."""

import pytest

from qerl.config.load import load_config
from qerl.model.spec import ModelSpec
from qerl.records import Prompt
from qerl.train.warnings import WINDOW, config_warnings, cpu_warnings, prompt_warnings, step_warnings, trend_warnings

HEALTHY = {
    "reward": 0.4,
    "accuracy": 0.4,
    "entropy": 0.5,
    "completions/clipped_ratio": 0.1,
    "frac_reward_zero_std": 0.4,
    "aqn/sigma": 0.01,
    "mean_abs_prob_difference": 1e-4,
    "groups/mixed": 0.6,
    "groups/all_correct": 0.2,
    "groups/all_wrong": 0.2,
    "groups/all_truncated": 0.0,
    "outcomes/correct": 0.4,
    "outcomes/wrong": 0.4,
    "outcomes/unparsable": 0.1,
    "outcomes/truncated": 0.1,
    "outcomes/unscorable": 0.0,
    "tokens/completion": 1000,
    "time/step": 10.0,
    "time/rollout": 6.0,
    "time/backward": 3.0,
    "time/noise": 0.1,
    "time/switch": 0.0,
}


def config(*settings):
    return load_config(None, list(settings))


def step(*settings, **changes):
    metrics = {**HEALTHY, **{key.replace("__", "/"): value for key, value in changes.items()}}
    return {notice.key: notice.text for notice in step_warnings(config(*settings), metrics)}


def outcomes(**shares):
    rest = dict.fromkeys(("correct", "wrong", "unparsable", "truncated", "unscorable"), 0.0)
    return {f"outcomes__{kind}": share for kind, share in {**rest, **shares}.items()}


def test_a_healthy_step_gives_no_warning():
    assert step() == {}


def test_answers_that_were_computed_again_are_told_with_what_helps_where_they_are_many():
    settings = ("rollout.prompts_per_step=4", "rollout.group_size=8")
    assert step(*settings, rollout__preemptions=3) == {}
    found = step(*settings, rollout__preemptions=4)
    assert list(found) == ["preempted"]
    for words in ("put back 4 times, of 32", "rollout.max_num_seqs", "rollout.kv_cache_gb"):
        assert words in found["preempted"]
    # Of all that were drawn, where some were left out.
    rounds = {"sampling__groups_kept": 4, "sampling__groups_dropped": 6}
    assert step(*settings, rollout__preemptions=8, **rounds) == {}
    assert "put back 9 times, of 80" in step(*settings, rollout__preemptions=9, **rounds)["preempted"]


@pytest.mark.parametrize(
    ("shares", "key", "words"),
    [
        ({"truncated": 0.96, "wrong": 0.04}, "truncated", ["96 %", "rollout.max_new_tokens=1024", "raise it"]),
        ({"unparsable": 0.7, "wrong": 0.3}, "unparsable", ["70 %", "parser", "\\boxed{}"]),
        ({"unscorable": 0.5, "wrong": 0.5}, "unscorable", ["50 %", "notes", "beside 50 % wrong"]),
        (
            {"truncated": 0.45, "unparsable": 0.35, "wrong": 0.2},
            "truncated",
            ["45 % of the answers were cut", "beside 35 % unparsable, 20 % wrong"],
        ),
        ({"unparsable": 0.4, "wrong": 0.35, "truncated": 0.25}, "unparsable", ["40 %", "parser", "25 % truncated"]),
        ({"unscorable": 0.9, "wrong": 0.1}, "unscorable", ["90 %", "notes"]),
        ({"wrong": 1.0}, "wrong", ["100 %", "too hard"]),
    ],
)
def test_accuracy_zero_names_its_cause_with_its_share(shares, key, words):
    found = step(reward=0.0, accuracy=0.0, **outcomes(**shares))
    assert found.keys() == {f"nothing_right/{key}"}
    for word in words:
        assert word in found[f"nothing_right/{key}"]


def test_a_batch_without_any_score_points_at_the_reward_function():
    assert step(reward=None).keys() == {"unscored"}


def test_no_eos_token_seen():
    (text,) = step(completions__clipped_ratio=1.0).values()
    assert "no EOS token was seen" in text and "chat template" in text


@pytest.mark.parametrize(
    ("kind", "words"),
    [("all_correct", "too easy"), ("all_wrong", "too hard"), ("all_truncated", "cut off"), ("mixed", "same reward")],
)
def test_equal_groups_name_which_kind_they_are(kind, words):
    kinds = {f"groups__{k}": float(k == kind) for k in ("mixed", "all_correct", "all_wrong", "all_truncated")}
    found = step(frac_reward_zero_std=1.0, **kinds)
    assert words in found[f"all_equal/{kind}"]


def test_alarm_lines_hold_for_the_kernel_term_and_not_for_the_noise():
    assert step(mean_abs_prob_difference=0.007).keys() == {"warning/mean_abs_prob_difference"}
    assert len(step(mean_abs_prob_difference=0.02)) == 2
    absent = "objective.noise=absent"
    assert step(absent, mean_abs_prob_difference=0.02) == {}
    assert (
        step(absent, mean_abs_prob_difference=0.02, **{"aqn/sigma": 0.0}).keys()
        == step(mean_abs_prob_difference=0.02).keys()
    )
    found = step(absent, **{"mismatch/kernel/mean_abs_prob_difference": 0.02})
    assert found.keys() == {f"{s}/mismatch/kernel/mean_abs_prob_difference" for s in ("warning", "fault")}


def trend(*settings, early=None, late=None, count=2 * WINDOW):
    rows = [{**HEALTHY, **(early or {})}] * (count - WINDOW) + [{**HEALTHY, **(late or {})}] * WINDOW
    return {notice.key: notice.text for notice in trend_warnings(config(*settings), rows)}


NOISIER = {"entropy": 0.7, "outcomes/unparsable": 0.25}


def test_a_steady_run_shows_no_trend_and_a_short_one_is_not_judged():
    assert trend() == {}
    assert trend(late=NOISIER, count=2 * WINDOW - 1) == {}


def test_entropy_up_valid_answers_down_and_mixed_groups_flat():
    (text,) = trend(late=NOISIER).values()
    assert "0.5 to 0.7 nats" in text and "80 % to 65 %" in text and "60 % to 60 %" in text


@pytest.mark.parametrize(
    "late",
    [
        {**NOISIER, "groups/mixed": 0.7},
        {**NOISIER, "outcomes/unparsable": 0.12},
        {**NOISIER, "entropy": 0.52},
        {**NOISIER, "entropy": None},
    ],
)
def test_one_half_of_that_pattern_is_no_warning(late):
    assert "entropy_without_signal" not in trend(late=late)


MORE_MIXED = {"groups/mixed": 0.72, "time/step": 14.0}


@pytest.mark.parametrize(
    ("late", "settings", "key", "words"),
    [
        ({"time/backward": 7.0}, ["quant.format=nvfp4"], "backward", "dequantizing nvfp4 weights"),
        ({"time/backward": 7.0}, ["quant.format=bf16"], "backward", "stage backward ate the gain"),
        ({"time/noise": 4.1}, [], "noise", "switching between sampling and learning"),
        ({"time/switch": 4.0}, [], "switch", "changing over between engine and trainer"),
        ({"time/rollout": 10.0}, [], "rollout", "stage rollout ate the gain"),
        ({"time/rollout": 10.0, "tokens/completion": 1600}, [], "length", "1000 to 1600 tokens"),
    ],
)
def test_more_mixed_groups_but_not_more_of_them_a_second(late, settings, key, words):
    found = trend(*settings, late={**MORE_MIXED, **late})
    assert found.keys() == {f"gain_eaten/{key}"}
    assert words in found[f"gain_eaten/{key}"]


def test_more_mixed_groups_at_the_same_speed_are_no_warning():
    assert trend(late={**MORE_MIXED, "time/step": 11.0}) == {}
    assert trend(late={"time/step": 14.0}) == {}


def prompt(text, question="How many?"):
    return Prompt(id="q1", question=question, answer="1", text=text, token_ids=(1,))


def test_prompts_without_a_chat_template_are_named():
    template = "{question} Box it."
    assert prompt_warnings([prompt("<user>How many? Box it.<assistant>")], template) == []
    (text,) = prompt_warnings([prompt("How many? Box it.\n"), prompt("<user>How many? Box it.")], template)
    assert text.startswith("50 % of the prompts") and "q1" in text


def test_settings_with_a_price_are_named():
    assert config_warnings(config()) == []
    assert len(config_warnings(config("rollout.top_p=0.9"))) == 1
    assert len(config_warnings(config("objective.noise=absent", "objective.denominator=behavior"))) == 1


@pytest.mark.parametrize(
    ("settings", "harmless", "piece"),
    [
        (["objective.type=gspo"], ["objective.denominator=recomputed"], "denominator=recomputed"),
        (["objective.type=gspo"], ["model.dtype=float32"], "denominator=recomputed"),
        (["objective.kl_coef=0.1", "objective.kl_estimator=k1"], ["objective.kl_estimator=k2"], "averages to zero"),
        (["objective.denominator=recomputed", "objective.is_cap=unbounded"], ["objective.is_cap=5"], "of any size"),
    ],
)
def test_legal_settings_that_do_not_do_what_they_seem_to(settings, harmless, piece):
    (text,) = config_warnings(config(*settings))
    assert piece in text
    assert config_warnings(config(*settings, *harmless)) == []


SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


def test_bfloat16_on_a_cpu_without_instructions_for_it_is_told_of_where_the_model_is_large(monkeypatch):
    spec = ModelSpec.from_config(SMOLLM2)
    monkeypatch.setattr("qerl.train.warnings.cpu_multiplies_bfloat16", lambda: False)
    (text,) = cpu_warnings(config(), spec, "cpu")
    assert "model.dtype=float32" in text
    assert cpu_warnings(config("model.dtype=float32"), spec, "cpu") == cpu_warnings(config(), spec, "cuda") == []
    assert cpu_warnings(config(), ModelSpec.from_config(SMOLLM2 | {"num_hidden_layers": 2}), "cpu") == []
    for told in (True, None):
        monkeypatch.setattr("qerl.train.warnings.cpu_multiplies_bfloat16", lambda told=told: told)
        assert cpu_warnings(config(), spec, "cpu") == []

"""Reading configurations: precedence, strictness, and what the messages say."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from qerl.config.fields import all_keys
from qerl.config.load import dump_config, load_config
from qerl.config.schema import Config
from qerl.config.yaml_io import dump_yaml, parse_yaml
from qerl.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def message_of(path: Path | None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_defaults_alone_are_the_schema_defaults():
    assert load_config() == Config()


def test_overrides_beat_the_file_and_the_file_beats_the_defaults(tmp_path):
    path = write(tmp_path, "optim: {lr: 3e-4, eps: 1e-6}\nlora: {rank: 8}\n")
    config = load_config(path, ["lora.rank=4", "lora.rank=2"])
    assert (config.optim.lr, config.optim.eps, config.lora.rank, config.lora.alpha) == (3e-4, 1e-6, 2, 32.0)


def test_lists_feed_tuples_and_integers_feed_numbers(tmp_path):
    config = load_config(write(tmp_path, "lora:\n  targets: [q_proj, v_proj]\n  alpha: 16\noptim: {betas: [0.8, 1]}\n"))
    assert config.lora.targets == ("q_proj", "v_proj")
    assert config.lora.alpha == 16.0
    assert config.optim.betas == (0.8, 1.0)


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "1.0e-5", "0.00001", ".00001", "+1e-5"])
def test_every_way_to_write_a_number_is_a_number(text):
    assert load_config(None, [f"optim.lr={text}"]).optim.lr == 1e-5


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("rollout.temperature=0", 0.0),
        ("rollout.temperature=0.001", 0.001),
        ("rollout.top_k=1000000000", 10**9),
        ("train.memory_budget=1e36", 1e36),
        ("train.seed=18446744073709551615", 2**64 - 1),
    ],
)
def test_the_ends_of_what_is_allowed_are_allowed(override, value):
    name = override.partition("=")[0]
    section, key = name.split(".")
    assert getattr(getattr(load_config(None, [override]), section), key) == value


def test_off_and_on_are_words_not_booleans():
    config = load_config(None, ["log.progress=off", "quant.dense_cache=on", "objective.is_cap=off"])
    assert (config.log.progress, config.quant.dense_cache, config.objective.is_cap) == ("off", "on", "off")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ('lora.rank="8"', "got '8'; expected integer >= 1"),
        ("lora.rank=8.0", "got 8.0; expected integer >= 1"),
        ("lora.rank=true", "got True; expected integer >= 1"),
        ("lora.rank=010", "got '010'; expected integer >= 1"),
        ("lora.train_norms=yes", "got 'yes'; expected true or false"),
        ("lora.train_norms=1", "got 1; expected true or false"),
        ("optim.lr=0", "got 0; expected number > 0"),
        ("optim.lr=.inf", "got '.inf'; expected number > 0"),
        ("optim.lr=1e999", "got '1e999'; expected number > 0"),
        ("optim.betas=[0.9]", "got [0.9]; expected list of 2: (number >= 0 and <= 1), (number >= 0 and <= 1)"),
        ("rollout.max_num_seqs=all", "got 'all'; expected integer >= 1 or auto"),
        ("eval.max_new_tokens=0", "got 0; expected integer >= 1 or null"),
        ("quant.format=nvpf4", "got 'nvpf4'; expected bf16, nvfp4, mxfp4 or nf4. Did you mean nvfp4?"),
        ("lora.targets=[q_proj, kproj]", "Did you mean k_proj?"),
        (
            "lora.targets=[q_proj, q_proj]",
            "q_proj']; expected list of (q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj or down_proj), each named once",
        ),
        ("log.backends=[jsonl, jsonl]", "wandb or trackio), each named once"),
        ("rollout.temperature=1e-50", "got 1e-50; expected number >= 0, at least 0.001 where it is not 0 (greedy)"),
        ("eval.temperature=0.0009", "got 0.0009; expected number >= 0, at least 0.001 where it is not 0 (greedy)"),
        ("rollout.top_k=100000000000000000000", "got 100000000000000000000; expected integer >= 0, at most 1e+09"),
        ("rollout.max_new_tokens=1000000001", "got 1000000001; expected integer >= 1, at most 1e+09"),
        ("train.memory_budget=1e300", "got 1e+300; expected number > 0 or auto or off, at most 1e+36"),
        ("rollout.kv_cache_gb=1e300", "got 1e+300; expected number > 0 or auto, at most 1e+36"),
        ("reward.weights=[1, -1e37]", "got [1, -1e+37]; expected list of (number), at most 1e+36"),
        ("aqn.num_stages=1000000", "got 1000000; expected integer >= 2 and <= 10000"),
        ("train.seed=18446744073709551616", "got 18446744073709551616; expected integer >= 0 and < 1.84467e+19"),
        ("quant=3", "quant (command line) is a section; got 3; expected a mapping with some of format, method"),
    ],
)
def test_a_wrong_value_is_refused_with_key_value_and_expectation(override, expected):
    text = message_of(None, override)
    assert text.startswith(override.partition("=")[0])
    assert expected in text


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("rollout.tempurature", "rollout.temperature"),
        ("lr", "optim.lr"),
        ("optim.lrr", "optim.lr"),
        ("train.group_size", "rollout.group_size"),
        ("reward.overlong.bufer_tokens", "reward.overlong.buffer_tokens"),
        ("num_generations", "rollout.group_size"),
        ("objective.beta", "objective.kl_coef"),
        ("optim.learning_rate", "optim.lr"),
    ],
)
def test_an_unknown_key_names_the_nearest_one(key, meant):
    text = message_of(None, f"{key}=0.5")
    assert f"unknown key {key} (command line)" in text
    assert "got value 0.5" in text
    assert f"Did you mean {meant}?" in text


def test_an_unknown_key_close_to_nothing_points_to_the_list():
    assert "docs/config.md lists all keys" in message_of(None, "zzzz.qqqq=1")


def test_all_problems_are_reported_together_with_their_lines(tmp_path):
    path = write(tmp_path, "optim:\n  lr: fast\nlora:\n  rank: 0\n  rnk: 3\nquants: {format: nvfp4}\n")
    text = message_of(path, "nonsense", "seed=1")
    assert text.startswith("6 problems")
    for piece in (
        f"optim.lr ({path}, line 2); got 'fast'",
        f"lora.rank ({path}, line 4); got 0",
        f"unknown key lora.rnk ({path}, line 5); got value 3. Did you mean lora.rank?",
        f"unknown key quants ({path}, line 6); got value {{'format': 'nvfp4'}}. Did you mean quant?",
        "argument 'nonsense' is no setting",
        "unknown key seed (command line); got value 1. Did you mean train.seed?",
    ):
        assert piece in text


def test_a_dotted_key_inside_a_file_is_told_apart_from_the_nested_one(tmp_path):
    path = write(tmp_path, "lora:\n  rank: 8\nlora.rank: 3\n")
    assert f"lora.rank ({path}, line 3) is written flat; expected `lora:` with `rank:` indented" in message_of(path)


@pytest.mark.parametrize(
    ("settings", "pieces"),
    [
        ([], ["train.mode=full", "quant.format=nvfp4", "quant.format=bf16"]),
        (["quant.format=bf16", "quant.lm_head=fp8"], ["quant.lm_head=fp8"]),
        (["quant.format=bf16", 'quant.overrides={"layers.0.*": nvfp4}'], ["quant.overrides layers.0.*: nvfp4"]),
        (["quant.format=bf16", "lora.rank=16"], ["lora.rank has no meaning"]),
        (["quant.format=bf16", "lora.train_norms=false"], ["lora.train_norms has no meaning"]),
        (["quant.format=bf16", "objective.kl_coef=0.01"], ["objective.kl_coef=0.01", "second copy", "kl_coef=0"]),
    ],
)
def test_what_full_mode_cannot_have_is_refused(settings, pieces):
    message = message_of(None, "train.mode=full", *settings)
    for piece in pieces:
        assert piece in message


def test_kept_rollout_models_are_off_in_full_mode_unless_asked_for():
    full = ["train.mode=full", "quant.format=bf16"]
    assert load_config(None, []).train.save_adapter_every == 1
    assert load_config(None, full).train.save_adapter_every == 0
    assert load_config(None, [*full, "train.save_adapter_every=5"]).train.save_adapter_every == 5


def test_contradictory_keys_are_refused_by_name():
    text = message_of(None, "rollout.prompts_per_step=30", "optim.updates_per_rollout=4")
    assert "rollout.prompts_per_step=30" in text
    assert "optim.updates_per_rollout=4" in text


def test_text_keys_take_what_is_typed():
    template = "{question} Answer: [yes, no]"
    config = load_config(
        None, [f"data.prompt_template={template}", "run.name=007", "model.path=1e5", "data.system_prompt="]
    )
    assert config.data.prompt_template == template
    assert (config.run.name, config.model.path, config.data.system_prompt) == ("007", "1e5", "")


def test_text_keys_accept_null_and_quotes():
    config = load_config(None, ["model.path=null", r'data.prompt_template="{question}\nThink."'])
    assert config.model.path is None
    assert config.data.prompt_template == "{question}\nThink."


def test_a_free_mapping_takes_keys_with_dots(tmp_path):
    path = write(tmp_path, 'quant:\n  overrides: {"layers.0.*": bf16}\n')
    config = load_config(path, ["quant.overrides.layers.1.mlp.*=bf16"])
    assert config.quant.overrides == {"layers.0.*": "bf16", "layers.1.mlp.*": "bf16"}


def test_a_section_given_at_once_is_merged(tmp_path):
    config = load_config(write(tmp_path, "optim: {lr: 1e-3, eps: 1e-6}\n"), ["optim={lr: 1e-4}"])
    assert (config.optim.lr, config.optim.eps) == (1e-4, 1e-6)


def test_sections_with_all_keys_commented_out_change_nothing(tmp_path):
    assert load_config(write(tmp_path, "lora:\n  # rank: 8\nreward:\n  overlong:\n")) == Config()


def test_an_empty_file_is_the_defaults(tmp_path):
    assert load_config(write(tmp_path, "# nothing\n")) == Config()


@pytest.mark.parametrize(
    ("content", "line", "complaint"),
    [
        ("lora:\n  rank: 8\n  rank: 16\n", 3, "the key 'rank' stands here and in line 2"),
        ("lora:\n  rank: 8\n  targets: [q_proj\noptim:\n", 4, "flow sequence"),
        ("lora:\n\trank: 8\n", 2, "cannot start any token"),
        ("model: !!python/object:os.system {}\n", 1, "could not determine a constructor"),
        ("lora:\n  rank: !!int ten\n", 2, "'ten' is no int"),
        ("lora:\n  rank: !!int ''\n", 2, "'' is no int"),
        ("optim:\n  lr: !!float fast\n", 2, "'fast' is no float"),
        ("optim:\n  betas: [0.9, !!float fast]\n", 2, "'fast' is no float"),
        ("aqn:\n  enabled: !!bool maybe\n", 2, "'maybe' is no bool"),
        ("? !!int ten\n: 3\n", 1, "'ten' is no int"),
        ("a: &a\n  b: *a\n", None, "nested too deeply"),
        ("a: &a [*a]\n", None, "nested too deeply"),
        ("a: " + 2000 * "[" + 2000 * "]", None, "nested too deeply"),
    ],
)
def test_bad_yaml_is_refused_with_its_line(tmp_path, content, line, complaint):
    text = message_of(write(tmp_path, content))
    assert complaint in text
    assert line is None or f"line {line}," in text


def test_a_tag_that_fits_its_scalar_is_taken(tmp_path):
    config = load_config(write(tmp_path, "lora: {rank: !!int '8'}\noptim: {lr: !!float 1, eps: !!float 1e-6}\n"))
    assert (config.lora.rank, config.optim.lr, config.optim.eps) == (8, 1.0, 1e-6)


def test_a_number_of_thousands_of_digits_is_refused_by_its_key(tmp_path):
    digits = 5000 * "9"
    assert "train.steps (command line); got '999" in message_of(None, f"train.steps={digits}")
    assert "line 1); got '-999" in message_of(write(tmp_path, f"train: {{steps: -{digits}}}\n"))


def test_a_file_that_is_no_mapping_is_refused(tmp_path):
    assert "holds no sections; got ['a', 'b']" in message_of(write(tmp_path, "[a, b]\n"))


def test_a_missing_file_names_the_nearest_one(tmp_path):
    write(tmp_path, "")
    text = message_of(tmp_path / "runn.yaml")
    assert "does not exist" in text
    assert f"Did you mean {tmp_path / 'run.yaml'}?" in text


def test_a_folder_or_a_binary_file_is_refused(tmp_path):
    assert "is a folder" in message_of(tmp_path)
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00")
    assert "is not a text file" in message_of(tmp_path / "run.yaml")


def test_the_resolved_file_reads_back_equal(tmp_path):
    overrides = ["run.name=off", "model.path=1e-5", "objective.noise=absent", "data.prompt_template=a: {question} # b"]
    config = load_config(None, [*overrides, "quant.overrides.layers.0.*=bf16", "optim.lr=1.2345678901234567e-7"])
    text = dump_config(config)
    assert load_config(write(tmp_path, text)) == config
    assert Config.model_validate(yaml.safe_load(text), strict=False) == config, (
        "a plain YAML 1.1 reader must see the same"
    )


def test_the_resolved_file_shows_what_auto_became():
    shown = yaml.safe_load(dump_config(load_config(None, ["objective.noise=absent"])))
    assert shown["objective"]["denominator"] == "recomputed"
    assert shown["objective"]["is_cap"] == 2.0


@pytest.mark.parametrize(
    ("settings", "together"),
    [([], True), (["rollout.static_shapes=true"], False), (["rollout.read_together=false"], False)],
)
def test_prompts_are_read_together_where_shapes_may_change_and_nobody_objects(settings, together):
    assert load_config(None, settings).reads_together is together


@given(st.recursive(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
                    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(), inner, max_size=4)), max_leaves=8))  # fmt: skip
def test_yaml_round_trips_any_plain_value(value):
    read, _ = parse_yaml(dump_yaml(value))
    assert read == value
    if isinstance(value, float):
        assert math.copysign(1.0, read) == math.copysign(1.0, value)


def test_every_key_has_a_meaning_and_an_expectation():
    for key in all_keys().values():
        assert key.meaning, key.name
        assert key.expected, key.name

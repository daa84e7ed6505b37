"""``extends``: a file that holds only what differs from another."""

import pytest

from qerl.config.load import load_config
from qerl.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


def test_only_what_differs_is_changed_and_the_command_line_has_the_last_word(write):
    write("base.yaml", "optim: {lr: 1.0e-4, weight_decay: 0.0}\ntrain: {steps: 7}\nlora: {targets: [q_proj, v_proj]}\n")
    path = write("more/child.yaml", "extends: ../base.yaml\noptim: {lr: 1.0e-3}\nlora: {targets: [o_proj]}\n")
    config = load_config(path, ["train.steps=9"])
    assert (config.optim.lr, config.optim.weight_decay, config.train.steps) == (1e-3, 0.0, 9)
    assert config.lora.targets == ("o_proj",)


def test_files_extend_files_that_extend(write):
    write("a.yaml", "train: {steps: 1, seed: 1}\nrun: {name: a}\n")
    write("b.yaml", "extends: a.yaml\ntrain: {steps: 2}\n")
    config = load_config(write("c.yaml", "extends: b.yaml\nrun: {name: c}\n"))
    assert (config.train.steps, config.train.seed, config.run.name) == (2, 1, "c")


def test_sections_inside_sections_are_merged_and_free_mappings_are_not(write):
    write(
        "base.yaml", 'reward: {overlong: {enabled: true, buffer_tokens: 8}}\nquant: {overrides: {"layers.0.*": bf16}}\n'
    )
    child = write(
        "child.yaml",
        'extends: base.yaml\nreward: {overlong: {penalty: 0.5}}\nquant: {overrides: {"layers.1.*": bf16}}\n',
    )
    config = load_config(child)
    overlong = config.reward.overlong
    assert (overlong.enabled, overlong.buffer_tokens, overlong.penalty) == (True, 8, 0.5)
    assert config.quant.overrides == {"layers.1.*": "bf16"}


def test_a_mistake_is_placed_in_the_file_that_holds_it(write):
    base = write("base.yaml", "train:\n  steps: 1\n  sed: 1\n")
    child = write("child.yaml", "extends: base.yaml\noptim:\n  lr: fast\n")
    with pytest.raises(ConfigError) as error:
        load_config(child)
    assert f"train.sed ({base}, line 3)" in str(error.value) and f"optim.lr ({child}, line 3)" in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: nothing.yaml", "nothing.yaml does not exist"),
        ("extends: 3", r"extends \(.*line 1\) names no file; got 3"),
        ("extends: [a.yaml]", "names no file"),
        ("extends: /a.yaml", "relative to"),
        ("extends: child.yaml", "extends itself"),
    ],
)
def test_what_cannot_be_extended_is_refused(write, text, message):
    with pytest.raises(ConfigError, match=message):
        load_config(write("child.yaml", text + "\n"))


def test_a_circle_is_refused(write):
    write("a.yaml", "extends: b.yaml\n")
    with pytest.raises(ConfigError, match=r"extends itself; got a.yaml -> b.yaml -> a.yaml"):
        load_config(write("b.yaml", "extends: a.yaml\n").with_name("a.yaml"))

"""Matrix files: what becomes of them, and what is refused before any work."""

import pytest
from matrix_builders import ARMS, write_matrix

from qerl.config.schema import Config
from qerl.errors import ConfigError
from qerl.experiments.cells import expand, flat_settings, load_matrix

TUNED = {
    "protocol": "best_recipe",
    "axes": {"optim.lr": [1e-3, 3e-3]},
    "tuning": {"seeds": [9], "set": {"train.steps": 2}},
}


def cells(tmp_path, settings=(), **changes):
    path = write_matrix(tmp_path, **changes)
    options = {key: changes.pop(key) for key in ("choices", "temperatures") if key in changes}
    return expand(load_matrix(path), path, settings, tmp_path / "out", **options)


def refused(tmp_path, match, settings=(), **changes):
    with pytest.raises(ConfigError, match=match):
        cells(tmp_path, settings, **changes)


def test_cells_are_the_product_of_arms_axes_and_seeds_with_one_seed_of_all_before_the_next(tmp_path):
    arms = [ARMS[0], ARMS[1] | {"seeds": [0, 1, 2]}]
    found = cells(tmp_path, axes={"optim.lr": [1e-5, 3e-5]}, arms=arms, seeds=[0, 1])
    assert [cell.name for cell in found] == [
        *("plain-lr1e-05-s0", "plain-lr3e-05-s0", "noisy-lr1e-05-s0", "noisy-lr3e-05-s0"),
        *("plain-lr1e-05-s1", "plain-lr3e-05-s1", "noisy-lr1e-05-s1", "noisy-lr3e-05-s1"),
        *("noisy-lr1e-05-s2", "noisy-lr3e-05-s2"),
    ]
    chosen = found[7].config
    assert (chosen.optim.lr, chosen.train.seed, chosen.aqn.sigma_start, chosen.quant.format) == (3e-5, 1, 0.1, "nvfp4")
    assert chosen.run.name == "noisy-lr3e-05-s1" and chosen.run.dir == str(tmp_path / "out")
    assert found[7].axes == {"optim.lr": 3e-5} and found[7].group == "noisy-lr3e-05"


def test_settings_of_the_matrix_lie_under_those_of_arms_and_of_the_command_line(tmp_path):
    found = cells(tmp_path, ["model.device=cpu"], set={"aqn.sigma_start": 0.3, "lora.rank": 3})
    assert [cell.config.aqn.sigma_start for cell in found] == [0.3, 0.1]
    assert {cell.config.lora.rank for cell in found} == {3}
    assert {cell.config.model.device for cell in found} == {"cpu"}


def test_an_impossible_cell_has_its_problem_and_the_others_none(tmp_path):
    broken = {"name": "broken", "set": {"aqn.num_stages": 1}}
    found = cells(tmp_path, arms=[*ARMS, broken])
    assert [cell.problem is None for cell in found] == [True, True, False]
    assert "aqn.num_stages" in found[2].problem and found[2].config is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.steps", 5),
        ("data.eval_limit", 4),
        ("eval.temperature", 0.5),
        ("rollout.group_size", 8),
        ("reward.functions", ["format"]),
        ("optim.lr", 1e-2),
        ("optim.weight_decay", 0.0),
    ],
)
def test_arms_that_differ_in_what_must_be_equal_are_refused(tmp_path, key, value):
    refused(
        tmp_path,
        rf"differ in what must be equal.*{key} \(plain against other\)",
        arms=[*ARMS, {"name": "other", "set": {key: value}}],
    )


def test_arms_may_be_folders_of_one_model_where_the_matrix_says_so(tmp_path):
    """Rounded to nearest against AWQ: the same model in two folders. Nothing else that must be equal can be let differ."""
    arms = [ARMS[0], {"name": "awq", "set": {"aqn.enabled": False, "model.path": "elsewhere"}}]
    refused(tmp_path, r"differ in what must be equal.*model\.path", arms=arms)
    refused(tmp_path, "vary", arms=arms, vary=["data.eval"])
    found = cells(tmp_path, arms=arms, vary=["model.path"])
    assert [cell.config.model.path for cell in found] == ["demo", "elsewhere"]


def test_an_axis_may_change_what_arms_may_not(tmp_path):
    assert len(cells(tmp_path, axes={"optim.lr": [1e-3, 1e-2], "train.steps": [2, 4]})) == 8


def test_matched_temperature_makes_a_cell_wait_until_it_is_known(tmp_path):
    arms = [*ARMS, {"name": "warm", "set": {"aqn.enabled": False}, "match_temperature": {"arm": "noisy"}}]
    path = write_matrix(tmp_path, arms=arms)
    matrix = load_matrix(path)
    assert [cell.pending for cell in expand(matrix, path, [], tmp_path)] == [False, False, True]
    known = expand(matrix, path, [], tmp_path, temperatures={"warm": 1.25})
    assert [cell.config.rollout.temperature for cell in known] == [1.0, 1.0, 1.25]
    assert not any(cell.pending for cell in known)


def test_best_recipe_tries_first_and_trains_the_choice_with_other_seeds(tmp_path):
    found = cells(tmp_path, **TUNED)
    assert [cell.name for cell in found] == [
        *("plain-lr0.001-tune-s9", "plain-lr0.003-tune-s9", "noisy-lr0.001-tune-s9", "noisy-lr0.003-tune-s9"),
        *("plain-final-s0", "noisy-final-s0"),
    ]
    assert [cell.config.train.steps for cell in found] == [2, 2, 2, 2, 3, 3]
    assert [cell.pending for cell in found] == [False] * 4 + [True] * 2
    path = tmp_path / "matrix.yaml"
    chosen = expand(load_matrix(path), path, [], tmp_path, choices={"noisy": {"optim.lr": 3e-3}})
    assert [cell.config.optim.lr for cell in chosen[4:]] == [1e-3, 3e-3]
    assert [cell.pending for cell in chosen[4:]] == [True, False]
    assert chosen[5].name == "noisy-final-s0" and chosen[5].axes == {"optim.lr": 3e-3}


def test_best_recipe_gives_every_arm_as_many_trials(tmp_path):
    arms = [ARMS[0] | {"axes": {"optim.lr": [1e-4, 1e-3, 1e-2]}}, ARMS[1]]
    refused(tmp_path, "as many trials; got plain 3, noisy 2", **TUNED | {"arms": arms})
    assert len(cells(tmp_path, **TUNED | {"arms": [ARMS[0] | {"axes": {"optim.lr": [1e-4, 1e-2]}}, ARMS[1]]})) == 6


def test_a_choice_is_not_judged_on_the_seeds_that_made_it(tmp_path):
    refused(tmp_path, "share 9", **TUNED | {"seeds": [0, 9]})


@pytest.mark.parametrize(
    ("match", "changes"),
    [
        (r"unknown key armz.*did you mean arms", {"armz": []}),
        (r"arms\.0\.sett.*did you mean set", {"arms": [{"name": "a", "sett": {}}]}),
        (r"named twice", {"arms": [ARMS[0], ARMS[0]]}),
        (r"arm label A is named twice", {"arms": [{"name": "x", "label": "A"}, {"name": "A"}]}),
        (r"an arm against itself: plain, plain", {"compare": [["plain", "plain"]]}),
        (r"one question twice", {"compare": [["plain", "noisy"], ["noisy", "plain"]]}),
        (r"may hold letters", {"arms": [{"name": "a-b"}]}),
        (r"unknown arm 'none'", {"compare": [["plain", "none"]]}),
        (r"unknown key optim\.lrr", {"axes": {"optim.lrr": [1]}}),
        (r"train\.seed is set by the matrix", {"set": {"train.seed": 3}}),
        (r"names one twice", {"seeds": [0, 0]}),
        (r"needs `tuning", {"protocol": "best_recipe"}),
        (r"has no tuning", {"tuning": {"seeds": [4]}}),
        (r"greedy answers would all be the same", {"final": [{"name": "avg", "samples": 4}]}),
        (r"'after' is that of the evaluations of training", {"final": [{"name": "after"}]}),
        (r"target is missing", {"target": None}),
        (
            r"asks for it to be found",
            {"arms": [*ARMS, {"name": "t", "set": {"rollout.temperature": 2}, "match_temperature": {"arm": "noisy"}}]},
        ),
        (
            r"still to be found",
            {
                "arms": [
                    {"name": "t", "match_temperature": {"arm": "u"}},
                    {"name": "u", "match_temperature": {"arm": "t"}},
                ]
            },
        ),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path, match, changes):
    if match == r"target is missing":
        path = write_matrix(tmp_path)
        path.write_text(
            "\n".join(line for line in path.read_text().splitlines() if "accuracy" not in line and "target" not in line)
        )
        with pytest.raises(ConfigError, match=match):
            load_matrix(path)
        return
    refused(tmp_path, match, **changes)


def test_a_list_with_an_entry_that_is_refused_is_not_said_to_be_empty(tmp_path):
    path = write_matrix(tmp_path, seeds=[-1])
    with pytest.raises(ConfigError) as caught:
        load_matrix(path)
    assert "seeds.0" in str(caught.value) and "at least 1 item" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"seeds.*at least 1 item"):
        load_matrix(write_matrix(tmp_path, seeds=[]))


def test_the_command_line_cannot_undo_an_arm(tmp_path):
    refused(tmp_path, r"aqn\.enabled is what the arms differ in", ["aqn.enabled=false"])
    refused(tmp_path, r"run\.name is set by the matrix", ["run.name=x"])


def test_a_file_that_is_not_there_names_the_nearest(tmp_path):
    write_matrix(tmp_path)
    with pytest.raises(ConfigError, match=r"matrix\.yaml\?"):
        load_matrix(tmp_path / "matrx.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1,")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_matrix(tmp_path / "bad.yaml")


def test_flat_settings_hold_every_key():
    flat = flat_settings(Config())
    assert flat["optim.lr"] == 1e-5 and flat["aqn.controller.enabled"] is False and flat["quant.overrides"] == {}

"""The matrices that ship: every cell's settings are sound, the arms are what the tables need, nothing points outside."""

from pathlib import Path

import pytest

from qerl.experiments.cells import expand, load_matrix

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "matrix"
FILES = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_cell_of_a_matrix_file_has_sound_settings(path):
    matrix = load_matrix(path)
    assert matrix.name == path.stem
    for cell in expand(matrix, path, [], Path("runs") / matrix.name):
        assert cell.problem is None, f"{cell.name}: {cell.problem}"
        for value in (cell.config.model.path, cell.config.data.train, cell.config.data.eval):
            assert value is not None and not value.startswith(("/", "~", "..")), value


def test_the_overview_names_every_matrix():
    text = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
    for path in FILES:
        assert f"`matrix/{path.name}`" in text, path.name


def test_the_mechanism_matrix_holds_the_arms_the_literature_lacks():
    path = FOLDER / "mechanism.yaml"
    matrix = load_matrix(path)
    first = {cell.arm.name: cell for cell in expand(matrix, path, [], Path("runs")) if cell.seed == 0}
    noise = {
        name: (c.config.aqn.magnitude, c.config.aqn.sigma_start) for name, c in first.items() if c.config.aqn.enabled
    }
    assert noise == {
        "nvfp4_aqn": ("absolute", 5e-2),
        "nvfp4_aqn_kl": ("kl", 2e-2),
        "nvfp4_aqn_paper": ("absolute", 1e-2),
        "bf16_aqn": ("absolute", 5e-2),
        "bf16_aqn_kl": ("kl", 2e-2),
        "bf16_aqn_paper": ("absolute", 1e-2),
    }
    assert {c.config.quant.format for c in first.values()} == {"bf16", "nvfp4", "nf4"}
    assert {name for name, c in first.items() if c.pending} == {"nvfp4_t", "bf16_t"}
    by_name = {arm.name: arm for arm in matrix.arms}
    assert len(matrix.seeds_of(by_name["nvfp4"])) == len(matrix.seeds_of(by_name["nvfp4_aqn"])) == 5
    assert min(len(matrix.seeds_of(arm)) for arm in matrix.arms) >= 3
    answers = {c.config.rollout.prompts_per_step * c.config.rollout.group_size for c in first.values()}
    assert answers == {256} and {c.config.eval.temperature for c in first.values()} == {0.0}
    assert 60 <= next(iter(first.values())).config.planned_updates <= 100

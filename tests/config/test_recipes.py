"""Recipes differ in what their names say, and in nothing else."""

from pathlib import Path

import pytest

from qerl.config.load import load_config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FORMATS = ("full", "bf16", "nf4", "mxfp4", "nvfp4", "nvfp4_aqn")
RATES = {"full": 1e-6, "bf16": 5e-6}
CELLS = [
    *(("gsm8k", size, fmt) for size in ("3b", "7b") for fmt in FORMATS),
    *(("bigmath", size, fmt) for size in ("7b", "14b", "32b") for fmt in ("bf16", "nvfp4", "nvfp4_aqn")),
    ("bigmath", "7b", "full"),
]
SECTION_OF = {
    "decay": "aqn",
    "sigma": "aqn",
    "rank": "lora",
    "norms": "lora",
    "noise": "quant",
    "scope": "aqn",
    "prompt": "aqn",
    "mode": "aqn",
    "sharing": "aqn",
    "magnitude": "aqn",
    "objective": "objective",
    "controller": "aqn",
}


def recipe(name):
    return load_config(CONFIGS / f"{name}.yaml")


def changed_sections(first, second):
    a, b = first.model_dump(), second.model_dump()
    return {section for section in a if a[section] != b[section]} - {"run"}


@pytest.mark.parametrize("cell", CELLS, ids="_".join)
def test_a_cell_of_the_tables_is_what_its_name_says(cell):
    task, size, fmt = cell
    config = recipe("_".join(cell))
    assert config.model.path == f"Qwen2.5-{size.upper()}-Instruct"
    assert config.quant.format == fmt.removesuffix("_aqn").replace("full", "bf16")
    assert config.train.mode == ("full" if fmt == "full" else "lora")
    assert config.aqn.enabled == fmt.endswith("_aqn")
    assert config.optim.lr == RATES.get(fmt, 1e-5)
    assert config.objective.type == {"gsm8k": "grpo", "bigmath": "dapo"}[task]
    assert config.rollout.prompts_per_step * config.rollout.group_size == 128


@pytest.mark.parametrize("cell", CELLS, ids="_".join)
def test_cells_of_a_row_share_everything_else(cell):
    task, size, fmt = cell
    changed = changed_sections(recipe(f"{task}_{size}_nvfp4_aqn"), recipe("_".join(cell)))
    assert changed <= {"quant", "aqn", "optim", *(["train"] if fmt == "full" else [])}


@pytest.mark.parametrize("path", sorted((CONFIGS / "ablations").glob("*.yaml")), ids=lambda path: path.stem)
def test_an_ablation_changes_one_section(path):
    changed = changed_sections(recipe("gsm8k_3b_nvfp4_aqn"), load_config(path))
    assert changed == {SECTION_OF[path.stem.split("_")[0]]}


def test_the_overview_names_every_recipe():
    text = (CONFIGS / "README.md").read_text(encoding="utf-8")
    for path in CONFIGS.rglob("*.yaml"):
        if path.parent.name == "matrix":
            continue
        named = f"`{path.name}`" in text or f"`{path.stem}`" in text
        in_table = any(path.stem == "_".join(cell) for cell in CELLS)
        assert named or in_table, path.name


def test_ambiguous_settings_are_named_where_they_are_decided():
    text = (CONFIGS / "gsm8k_3b_nvfp4_aqn.yaml").read_text(encoding="utf-8")
    for word in ("5e-2 to 5e-4", "1e-2 to 1e-4", "scripts: 16", "trains the layer norms", "AWQ", "Batch 128"):
        assert word in text, word

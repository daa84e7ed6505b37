"""Stored measurements say what made them, and hold what their command asked for or say what is missing."""

import json
import shlex
from pathlib import Path

import pytest

RESULTS = Path(__file__).resolve().parents[1] / "results"
ROLLOUTS = sorted(RESULTS.glob("rollout_[0-9]*.json"))


def option(command: list[str], name: str, default: str) -> str:
    return command[command.index(name) + 1] if name in command else default


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_file_names_its_command(path):
    words = shlex.split(json.loads(path.read_text())["command"])
    assert {"python", "qerl"} & set(words), words


@pytest.mark.parametrize("path", ROLLOUTS, ids=lambda path: path.stem)
def test_cells_of_a_rollout_that_were_not_reached_are_noted(path):
    content = json.loads(path.read_text())
    assert len(content["environment"]["commit"]) == 40
    command = shlex.split(content["command"])
    assert option(command, "--out", "") == f"results/{path.name}"
    sequences = [int(count) for count in option(command, "--sequences", "1,8,32,64,128,256").split(",") if count]
    asked = {
        (size, form, noise, count)
        for size in [option(command, "--size", "7B")]
        for form in option(command, "--formats", "nvfp4").split(",")
        for noise in option(command, "--noise", "off").split(",")
        for count in (*sequences, *(["realistic"] if "--realistic" in command else []))
    }
    held = {
        (cell["size"], cell["format"], cell["noise"], cell.get("sequences", "realistic")) for cell in content["cells"]
    }
    assert held <= asked
    missing = asked - held
    assert not missing or "not reached" in content.get("note", ""), missing

"""Stored measurements say what made them, and hold what their command asked for or say what is missing."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

RESULTS = Path(__file__).resolve().parents[1] / "results"
ROLLOUTS = sorted(RESULTS.glob("rollout_[0-9]*.json"))


def option(command: list[str], name: str, default: str) -> str:
    return command[command.index(name) + 1] if name in command else default


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_file_names_its_command(path):
    content = json.loads(path.read_text())
    words = shlex.split(content["command"])
    assert {"python", "qerl"} & set(words), words
    assert not [word for word in words if Path(word.rpartition("=")[2]).is_absolute()], "a path of one machine"
    if "driver" in content.get("environment", {}):
        known = content["environment"]
        assert len(known["commit"]) == 40 and not known["modified"]
        assert {"qerl", "torch", "triton"} <= known["versions"].keys() and (known["driver"] is None) == (
            not known["gpus"]
        )


def commits(content) -> Iterator[str]:
    """Every commit that a file names, at any depth."""
    values = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    if isinstance(content, dict) and isinstance(content.get("commit"), str):
        yield content["commit"]
    for value in values:
        yield from commits(value)


@pytest.mark.parametrize(
    "path", sorted(RESULTS.rglob("*.json")), ids=lambda path: str(path.relative_to(RESULTS).with_suffix(""))
)
def test_a_commit_is_named_by_all_of_its_digits(path):
    short = [commit for commit in commits(json.loads(path.read_text())) if not re.fullmatch("[0-9a-f]{40}", commit)]
    assert not short


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_rows_that_name_a_command_name_a_whole_commit(path):
    """Where a file is put together from several runs, each row says what made it; prose is no command."""
    content = json.loads(path.read_text())
    for name, row in content.get("rows", {}).items() if isinstance(content.get("rows"), dict) else ():
        if "command" in row:
            assert len(row["commit"]) == 40, name
            assert shlex.split(row["command"])[0] in ("python", "qerl"), name


@pytest.mark.parametrize("path", ROLLOUTS, ids=lambda path: path.stem)
def test_cells_of_a_rollout_that_were_not_reached_are_noted(path):
    content = json.loads(path.read_text())
    assert len(content["environment"]["commit"]) == 40
    command = shlex.split(content["command"])
    assert option(command, "--out", "") == f"results/{path.name}"
    counts = {"off": option(command, "--sequences", "1,8,32,64,128,256")}
    whole = ["realistic"] if "--realistic" in command else []
    asked = set()
    for index, name in enumerate(option(command, "--formats", "nvfp4").split(",")):
        base, _, head = name.partition("/")
        # Scopes of noise are timed with the first of the formats only.
        for noise in (scope for scope in option(command, "--noise", "off").split(",") if index == 0 or scope == "off"):
            sequences = counts.get(noise) or option(command, "--noise-at", "") or counts["off"]
            for count in (*map(int, filter(None, sequences.split(","))), *whole):
                asked.add((option(command, "--size", "7B"), base, head or "bf16", noise, count))
    held = {
        (
            *(cell["size"], cell["format"], cell.get("head", "bf16"), cell["noise"]),
            cell.get("sequences", "realistic"),
        )
        for cell in content["cells"]
    }
    assert held <= asked
    missing = asked - held
    assert not missing or "not reached" in content.get("note", ""), missing

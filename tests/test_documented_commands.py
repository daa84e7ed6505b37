"""Commands that pages show: verbs, benchmarks and options of theirs that exist."""

import re
from functools import cache
from pathlib import Path

import pytest
import typer
import yaml

from qerl.cli import app

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("configs/*.md")} - {ROOT / "CHANGELOG.md"})
PAGES += sorted([*ROOT.glob("qerl/**/README.md"), *ROOT.glob("benchmarks/**/README.md")])
VERB = re.compile(r"\bqerl ([a-z]+)\b([^\n`#]*)")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
SHOWN_AS_VERB = re.compile(r"(?:`|^ {4,})qerl ([a-z]+)\b", re.MULTILINE)
SCRIPT = re.compile(r"\bpython ((?:benchmarks|scripts)/[\w/]+\.py)([^\n`#]*)")
OPTION = re.compile(r"(?<!\S)(--[a-z][a-z0-9-]*)")


@cache
def verbs() -> dict[str, set[str]]:
    """Verb -> its options."""
    commands = typer.main.get_command(app).commands
    return {
        name: {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for name, command in commands.items()
    }


def options_of(script: Path) -> set[str]:
    """What a script's parser takes, by its text."""
    return {*re.findall(r'"(--[a-z][a-z0-9-]*)"', script.read_text(encoding="utf-8")), "--help"}


def problems(text: str) -> list[str]:
    """What a page shows and is not there."""
    in_blocks = [verb for block in FENCED.findall(text) for verb in re.findall(r"(?m)^qerl ([a-z]+)\b", block)]
    shown = [*SHOWN_AS_VERB.findall(text), *in_blocks]
    found = [f"qerl {verb}: no such verb" for verb in shown if verb not in verbs()]
    for verb, rest in VERB.findall(text):
        if verb not in verbs():
            continue
        known, words = verbs()[verb], rest.split()
        if verb == "bench" and words and re.fullmatch(r"[a-z_]+", words[0]):
            script = ROOT / "benchmarks" / f"{words[0]}.py"
            if not script.exists():
                found.append(f"qerl bench {words[0]}: no such benchmark")
                continue
            known = options_of(script)
        found += [f"qerl {verb}{rest}: {option}" for option in OPTION.findall(rest) if option not in known]
    for name, rest in SCRIPT.findall(text):
        if not (ROOT / name).exists():
            found.append(f"{name}: no such script")
        else:
            known = options_of(ROOT / name)
            found += [f"{name}{rest}: {option}" for option in OPTION.findall(rest) if option not in known]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_pages_have_options_that_exist(page):
    assert problems(page.read_text(encoding="utf-8")) == []


def test_commands_of_the_list_of_measurements_have_options_that_exist():
    jobs = yaml.safe_load((ROOT / "benchmarks" / "jobs.yaml").read_text())["jobs"]
    assert [found for job in jobs for found in problems(job["command"])] == []


@pytest.mark.parametrize(
    "text",
    [
        "`qerl trian x.yaml`",
        "```bash\nqerl evla RUN\n```",
        "    qerl eval RUN --bse",
        "`qerl bench kernel`",
        "qerl bench rollout --head nvfp4",
        "python benchmarks/rollout.py --hed x",
        "python scripts/none.py",
    ],
)
def test_what_is_not_there_is_found(text):
    assert len(problems(text)) == 1

"""Commands that pages show: verbs, benchmarks and options of theirs that exist. Programs in Python that they show run."""

import re
from functools import cache
from pathlib import Path
from typing import Any

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
PROGRAM = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
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


PROGRAMS = [
    pytest.param(program, id=f"{page.relative_to(ROOT)}-{index}")
    for page in PAGES
    for index, program in enumerate(PROGRAM.findall(page.read_text(encoding="utf-8")))
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_of_pages_compile(program):
    compile(program, "page", "exec")


def test_the_program_of_the_rollouts_page_does_what_it_says():
    (program,) = PROGRAM.findall((ROOT / "docs" / "rollout.md").read_text(encoding="utf-8"))
    found: dict[str, Any] = {}
    exec(program, found)
    completions, base, noisy = found["completions"], found["base"], found["noisy"]
    assert [answer.sample_key for answer in completions] == [0, 1, 2, 3] and len(found["prompts"]) == 1
    assert all(len(answer.token_ids) == len(answer.behavior_logprobs) for answer in completions)
    assert {answer.stop_reason for answer in completions} <= {"stop", "length"}
    # Fresh adapters change nothing, and noise does.
    assert [answer.token_ids for answer in completions] == [answer.token_ids for answer in base]
    assert [answer.behavior_logprobs for answer in completions] != [answer.behavior_logprobs for answer in noisy]


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

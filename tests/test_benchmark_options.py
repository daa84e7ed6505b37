"""Options of benchmarks are refused before anything is measured."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest
import yaml

from benchmarks import layers, options, rollout, step

REFUSED = {
    "--rows 0": "no number from 1 on",
    "--rows 4": "of --realistic",
    "--kv-gb 3": "of --realistic",
    "--realistic --kv-gb auto,nan": "'nan' is no room",
    "--realistic --kv-gb 0": "'0' is no room",
    "--realistic --kv-gb 3,": "'' is no room",
    "--realistic --prompt -3": "no number from 1 on",
    "--realistic --model demo": "of --model end by themselves",
    "--calls 0": "no number from 1 on",
    "--rank -4": "no number from 0 on",
    "--sequences 1,x": "'x' is no number",
    "--noise off,respons": "'respons' is not one of off, rollout",
    "--together maybe": "'maybe' is not one of off, on",
    "--formats nvfp4,nope": "'nope' is no format",
    "--formats nvfp4/nf4": "'nvfp4/nf4' is no format",
    "--size 9B": "invalid choice: '9B'",
    "rollout.read_together=false": "a setting of --model",
    "--data gsm8k": "--data is of --model, which is not given",
    "--prompts 8": "--prompts is of --model",
    "--answer 512": "--answer is of --model",
    **{
        f"--model demo {option}": f"{option.split()[0]} is of random weights, and --model is given"
        for option in (
            "--size 7B",
            "--formats bf16",
            "--noise off",
            "--noise-at 8",
            "--sequences 8",
            "--rank 32",
            "--calls 3",
            "--seconds 9",
            "--prompt 16",
            "--new 192",
            "--together on",
            "--dense-cache on",
            "--bare",
            "--rows 4",
            "--kv-gb auto",
            "--chunk 9",
        )
    },
    "--noise-at 8": "--noise-at is of scopes in --noise, which names none",
    "--kv-gb auto": "--kv-gb is of --realistic, which is not given",
    "--sequences=": "nothing is measured",
    "--sequences= --realistic --bare": "--bare is of --sequences, which names none",
    "--sequences= --realistic --noise response --new 9": "--new is of --sequences",
}


def refusal(module, words, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["benchmark", "--tiny", *words.split()])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("words", REFUSED)
def test_rollouts_are_not_begun_with_options_that_cannot_be(words, monkeypatch, capsys):
    assert REFUSED[words] in refusal(rollout, words, monkeypatch, capsys)


def test_every_option_of_rollouts_is_known_to_act_somewhere():
    """One that is not in the table acts always."""
    assert {*vars(rollout.parse([]))} - {*rollout.ACTS_ON} == {"out", "tiny", "model", "realistic", "settings"}


def test_rollouts_that_are_listed_are_not_refused():
    root = Path(__file__).resolve().parents[1]
    jobs = yaml.safe_load((root / "benchmarks" / "jobs.yaml").read_text())["jobs"]
    lines = [job["command"] for job in jobs] + (root / "docs" / "rollout.md").read_text().splitlines()
    found = [match[1] for line in lines for match in re.finditer(r"qerl bench rollout (.*?)(?: && |$)", line)]
    assert len(found) > 30
    for words in found:
        rollout.parse(shlex.split(words.strip("`"), comments=True))


@pytest.mark.parametrize(
    ("module", "words", "said"),
    [
        (step, "--whole-steps 0", "no number from 1 on"),
        (step, "--only whole,nonsense", "'nonsense' is not one of passes"),
        (step, "--sizes 70B", "'70B' is not one of"),
        (step, "--formats x", "'x' is not one of"),
        (step, "--most-new 7B", "no number from 1 on"),
        (step, "--most-new 9B=4", "no SIZE=N"),
        (layers, "--shapes 0x4", "no shape"),
        (layers, "--shapes 8x0", "no shape"),
        (layers, "--formats bf16+kept", "not one of"),
        (layers, "--layers 0", "no number from 1 on"),
    ],
)
def test_nor_steps_and_layers(module, words, said, monkeypatch, capsys):
    assert said in refusal(module, words, monkeypatch, capsys)


def test_lists_are_read_and_may_be_empty():
    assert options.counts("512,1") == [512, 1] and options.counts("") == []
    assert options.rooms("auto,3") == [None, 3.0]
    assert rollout.parse_formats("nvfp4,bf16/nvfp4") == [("nvfp4", "bf16"), ("bf16", "nvfp4")]
    assert options.names(("whole",), none=True)("") == []
    with pytest.raises(argparse.ArgumentTypeError):
        options.names(("whole",))("")

"""A run that goes on from its portable copy: the same plan and data, marked as not bit-exact."""

import json
from dataclasses import asdict

import pytest

from qerl.config.load import load_config
from qerl.data.synthetic import arithmetic_problems
from qerl.metrics.run_dir import RunDir
from qerl.train.portable import write_portable_run
from qerl.train.run import train
from qerl.train.stop import Deadline

SETTINGS = [
    "model.path=demo",
    "model.dtype=float32",
    "data.eval_limit=8",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.max_prompt_tokens=96",
    "rollout.max_new_tokens=24",
    "lora.rank=4",
    "optim.lr=1e-3",
    "train.steps=4",
    "train.save_every=0",
    "eval.every=0",
    "aqn.num_stages=2",
    "diagnostics.every=0",
    "log.progress=off",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for split in ("train", "test"):
        rows = [asdict(problem) for problem in arithmetic_problems(split, 64)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_run_goes_on_elsewhere_and_says_that_it_did(tmp_path, data):
    def config(folder):
        return load_config(None, [*SETTINGS, f"data.train={data}", f"data.eval={data}", f"run.dir={tmp_path / folder}"])

    whole = RunDir.open(train(config("whole")))
    first = RunDir.open(train(config("first"), stop_after=2))
    write_portable_run(first, tmp_path / "second" / "run")
    copied = RunDir.open(train(config("second"), resume=True))
    exact, carried = whole.read_metrics(), copied.read_metrics()
    assert [row["step"] for row in carried] == [0, 1, 2, 3, 4]
    assert [row.get("resumes/portable") for row in carried] == [None, None, None, 1, 1]
    # The first rollout after it asks the same prompts with nearly the same policy.
    for key in ("tokens/prompt", "learning_rate", "aqn/sigma"):
        assert carried[3][key] == exact[3][key]
    assert carried[3]["entropy"] == pytest.approx(exact[3]["entropy"], rel=0.1)
    summary = copied.read_json("summary.json")
    assert (summary["bit_exact"], summary["portable_resumes"]) == (False, [2])
    assert whole.read_json("summary.json")["bit_exact"] is True
    assert summary["paired"]["count"] == 8
    elapsed = [row["time/elapsed"] for row in carried]
    assert elapsed == sorted(elapsed) and elapsed[0] > 0


def test_a_deadline_ends_a_run_before_the_step_that_may_not_fit():
    now = [0.0]
    deadline = Deadline(100.0, clock=lambda: now[0])
    now[0] = 30.0
    deadline.restart()
    answers = []
    for seconds in (20.0, 10.0, 15.0, 10.0):
        now[0] += seconds
        answers.append(deadline.reached())
    # 50, 60, 75, 85 with 20 s as the longest stretch: 85 + 20 is beyond 100.
    assert answers == [False, False, False, True]
    assert deadline.seconds_left() == 15.0
    assert Deadline(None, clock=lambda: now[0]).reached() is False

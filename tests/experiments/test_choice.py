"""Which recipe is trained anew, and which trials count."""

import signal
from functools import partial

import pytest
from matrix_builders import ARMS, write_matrix

from qerl.errors import ConfigError
from qerl.experiments import pool, runner
from qerl.experiments.choice import best_recipe, choose, waiting_arms
from qerl.experiments.plan import open_plan, record_plan
from qerl.experiments.process import Ending
from qerl.experiments.runner import Orders
from qerl.metrics.run_dir import RunDir
from qerl.train.stop import Deadline

AXES = {"low": {"optim.lr": 1e-5}, "high": {"optim.lr": 1e-4}}


def test_the_best_mean_over_tuning_seeds_is_chosen():
    found = best_recipe({"low": [0.30, 0.32], "high": [0.40, 0.20]}, AXES)
    assert found["axes"] == {"optim.lr": 1e-5}
    assert abs(found["score"] - 0.31) < 1e-12
    assert (found["trials"], found["failed"]) == (4, 0)


def test_a_recipe_with_a_failed_trial_counts_and_cannot_be_chosen():
    found = best_recipe({"low": [0.30, 0.32], "high": [0.90, None]}, AXES)
    assert found["axes"] == {"optim.lr": 1e-5}
    assert (found["trials"], found["failed"]) == (4, 1)


def test_the_first_of_equals_is_chosen():
    assert best_recipe({"low": [0.3], "high": [0.3]}, AXES)["axes"] == {"optim.lr": 1e-5}


def test_nothing_is_chosen_when_all_failed():
    found = best_recipe({"low": [None], "high": [None]}, AXES)
    assert found["axes"] is None and found["score"] is None and found["failed"] == 2


CHANGES = {"arms": [ARMS[0]], "axes": {"optim.lr": [0.1, 0.2]}, "tuning": {"seeds": [7]}}
TRIALS = ("plain-lr0.1-tune-s7", "plain-lr0.2-tune-s7")


@pytest.fixture
def trials(tmp_path):
    """Two recipes of one arm, the first of them with a result."""
    plan = open_plan(write_matrix(tmp_path, protocol="best_recipe", **CHANGES), [], tmp_path / "out")
    record_plan(plan)

    def finished(name, accuracy):
        plan.manifest.set_state(name, "finished", error=None)
        run = RunDir.create(plan.out / name)
        run.append_metrics(1, {})
        run.write_json("summary.json", {"status": "finished", "evaluation": {"after": {"accuracy": accuracy}}})

    finished(TRIALS[0], 0.3)
    return plan, finished


def test_a_killed_trial_is_run_again_and_the_choice_is_trained_by_the_same_command(trials, monkeypatch):
    """Its recipe would have been the best one: no choice is made without it, and the next command runs it without being asked to. What
    another command chooses meanwhile is taken over."""
    plan, finished = trials
    killed = next(cell for cell in plan.cells if cell.name == TRIALS[1])
    plan.manifest.set_state(killed.name, "running")
    assert runner._ended(plan, killed, Ending(code=-signal.SIGKILL, last_words="")) == "failed"
    assert choose(plan) == {}
    assert [cell.name for cell in plan.cells if runner._is_due(plan, cell, Orders())] == [killed.name]

    assert waiting_arms(plan)[0].startswith(f"plain waits for trials that the machine ended: {killed.name}.")
    begun = []

    class Child:
        """In place of a process: the cell, which now comes to its end."""

        running = False

        def __init__(self, plan, arguments, *others):
            begun.append(arguments[1])

        def ending(self):
            finished(begun[-1], 0.4)
            runner._settle_choices(plan, Orders(), Deadline(None), lambda text: None)
            return Ending(code=0, last_words="")

    monkeypatch.setattr(pool, "Child", Child)
    after = runner.run_matrix(plan.path, [], plan.out, Orders(portable=False), lambda text: None)
    found = after.manifest.read()["choices"]["plain"]
    assert (found["axes"], found["score"], found["failed"]) == ({"optim.lr": 0.2}, 0.4, 0)
    assert begun == [killed.name, "plain-final-s0"] and not waiting_arms(after)
    assert next(cell.config.optim.lr for cell in after.cells if cell.name == begun[1]) == 0.2


def test_a_process_for_one_trial_leaves_the_choice_to_its_command(trials):
    """Made by the process of the last trial, it was no news to the command, which ended without training what was chosen."""
    plan, finished = trials
    finished(TRIALS[1], 0.4)
    orders = Orders(only=TRIALS, started_by=1)
    assert runner._settle_choices(plan, orders, Deadline(None), lambda text: None) is plan
    assert not plan.manifest.read()["choices"]


def test_a_trial_that_is_killed_again_and_again_can_be_given_up(trials, monkeypatch):
    plan, _ = trials
    plan.manifest.set_state(TRIALS[1], "failed", error="the process was ended by SIGKILL")
    monkeypatch.setattr(pool.Pool, "start", lambda *arguments, **more: pytest.fail("it runs again"))
    after = runner.run_matrix(
        plan.path, [], plan.out, Orders(only=TRIALS, portable=False, give_up=True), lambda text: None
    )
    found = after.manifest.read()["choices"]["plain"]
    assert (found["axes"], found["trials"], found["failed"]) == ({"optim.lr": 0.1}, 2, 1) and not waiting_arms(after)
    with pytest.raises(ConfigError, match="--retry --give-up"):
        runner.check_orders(plan, Orders(retry=True, give_up=True))


def test_a_collapsed_trial_counts_against_its_recipe(trials):
    plan, _ = trials
    plan.manifest.set_state(TRIALS[1], "failed", error="TrainingError: not finite", collapse=True)
    assert not any(runner._is_due(plan, cell, Orders()) for cell in plan.cells)
    assert choose(plan)["plain"]["failed"] == 1 and choose(plan)["plain"]["axes"] == {"optim.lr": 0.1}


def test_an_arm_that_could_not_choose_chooses_when_its_trials_were_run_again(trials):
    plan, finished = trials
    for name in TRIALS:
        plan.manifest.set_state(name, "failed", error="a signal", given_up=True)
    settle = partial(runner._settle_choices, plan, Orders(), Deadline(None), lambda text: None)
    plan = settle()
    final = plan.manifest.cell("plain-final-s0")
    assert final["state"] == "failed" and final["error"] == "none of its trials finished"
    settle()
    assert plan.manifest.cell("plain-final-s0") == final, "nothing has changed"
    finished(TRIALS[1], 0.4)
    plan = settle()
    assert plan.manifest.read()["choices"]["plain"]["axes"] == {"optim.lr": 0.2}
    assert plan.manifest.cell("plain-final-s0")["state"] == "waiting"
    assert [(cell.pending, cell.axes) for cell in plan.cells if cell.phase == "final"] == [(False, {"optim.lr": 0.2})]
    # A choice that is made stays, whatever other trials that are run again give.
    plan.manifest.set_state(TRIALS[0], "finished")
    RunDir(plan.out / TRIALS[0]).write_json(
        "summary.json", {"status": "finished", "evaluation": {"after": {"accuracy": 0.9}}}
    )
    assert settle().manifest.read()["choices"]["plain"]["axes"] == {"optim.lr": 0.2}


@pytest.mark.parametrize(
    "changes",
    [{"axes": {"optim.lr": [0.1]}}, {"axes": {"optim.lr": [0.2, 0.3]}}, {"tuning": {"seeds": [7, 8]}}],
)
def test_trials_that_change_after_the_choice_are_refused(trials, changes):
    """Else an arm would keep a setting that its axes lack, or be said to have chosen among trials that nobody looked at."""
    plan, finished = trials
    finished(TRIALS[1], 0.4)
    plan = runner._settle_choices(plan, Orders(), Deadline(None), lambda text: None)
    path = write_matrix(plan.path.parent, protocol="best_recipe", **(CHANGES | changes))
    with pytest.raises(ConfigError, match="arm plain has chosen its settings among other trials"):
        open_plan(path, [], plan.out)

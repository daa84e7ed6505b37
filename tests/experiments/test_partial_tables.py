"""Tables of a matrix of which some cells have ended, some are open and some have failed; by hand."""

from __future__ import annotations

import pytest
from summary_builders import axis_cell

from qerl.experiments.compare import compare_cells
from qerl.experiments.folders import Collection
from qerl.experiments.table import markdown
from qerl.report.arms import render_arms

IDS = "0123456789abcdef"
DETECT = {"sd": 0.01, "source": "assumed", "alpha": 0.05, "power": 0.8}
KNOWN = {
    "plan": {"protocol": "mechanism", "target": {"accuracy": 0.45, "device_seconds": 900.0}, "detect": DETECT},
    "detectable": [{"first": "a", "second": "b", "seeds": [3, 3], "difference": 0.03}],
}


def cell(arm, seed, after, *, state="finished", right=None, ids=IDS, **facts):
    """A cell with an evaluation before and, unless None, one after training of which every answer is known."""
    questions = {} if right is None else {"after": {"ids": ids, "samples": 1, "right": right}}
    return axis_cell(arm, 1e-4, seed, after, state=state) | {
        "run": f"{arm}-s{seed}",
        "axes": {},
        "questions": questions,
        **facts,
    }


def compared(*cells):
    (found,) = compare_cells(Collection(cells=cells, plans={"grid": KNOWN}))
    return found


def cells_of(line):
    return [part.strip() for part in line.strip("|").split("|")]


def row_of(comparison, name):
    lines = [line for line in markdown([comparison]).splitlines() if line.startswith("|")]
    at = next(number for number, line in enumerate(lines) if line.startswith(f"| {name} |"))
    head = max(number for number, line in enumerate(lines[:at]) if line.startswith("| ---")) - 1
    return dict(zip(cells_of(lines[head]), cells_of(lines[at]), strict=True))


def test_one_two_and_three_seeds_have_the_intervals_that_they_can_have():
    """None of one seed; t of 1 and 2 degrees of freedom are 12.706 and 4.303."""
    one = compared(cell("a", 0, 0.30))
    assert row_of(one, "A")["After"] == "30.0 %"
    two = compared(cell("a", 0, 0.30), cell("a", 1, 0.32))
    assert row_of(two, "A")["After"] == "31.0 % [18.3, 43.7]"
    three = compared(cell("a", 0, 0.30), cell("a", 1, 0.32), cell("a", 2, 0.31))
    assert row_of(three, "A")["After"] == "31.0 % [28.5, 33.5]"
    for comparison in (one, two, three):
        assert "nan" not in markdown([comparison]).lower() + render_arms([comparison]).split("<script", 1)[0].lower()


def test_a_label_of_two_lines_has_one_row():
    found = compared(cell("a", 0, 0.30, label="first\nsecond | third"))
    assert "| first second \\| third | 30.0 |" in markdown([found])


def test_a_cell_that_the_machine_ended_is_open_and_not_collapsed():
    """Memory that ran out beside other cells says nothing of the arm that it struck."""
    killed = cell("a", 1, None, state="failed", error="OutOfMemoryError: CUDA out of memory")
    diverged = cell("a", 2, None, state="failed", error="TrainingError: not finite", collapse=True)
    found = compared(cell("a", 0, 0.30), killed, diverged, cell("b", 0, 0.31))
    assert (found.arms[0].collapsed, found.arms[0].judged) == (1, 2)
    assert found.arms[0].target["tokens"].count == 2
    assert row_of(found, "A")["Collapsed"] == "1 of 2"
    first, second = (note for note in found.notes if "failed" in note)
    assert (
        first
        == "a-s1 failed: OutOfMemoryError: CUDA out of memory (not its training: it counts as open, not as collapsed)"
    )
    assert second == "a-s2 failed: TrainingError: not finite"


def test_cells_that_ended_alike_are_named_together_and_in_brief():
    """Seven cells that ran out of memory filled the table with the allocator's advice, seven times."""
    full = (
        "OutOfMemoryError: CUDA out of memory. Tried to allocate {} MiB. "
        + "If reserved memory is large, try more. " * 5
    )
    cells = [cell("a", seed, None, state="failed", error=full.format(seed)) for seed in (1, 2)]
    invalid = cell("b", 1, None, state="invalid", error="the model cannot be found")
    found = compared(cell("a", 0, 0.30), *cells, cell("b", 0, 0.31), invalid)
    assert found.notes == (
        "a-s1, a-s2 failed: OutOfMemoryError: CUDA out of memory (not their training: they count as open, not as collapsed)",
        "b-s1 is invalid: the model cannot be found",
    )
    page = render_arms([found])
    assert "try more" not in page


def evaluated(arm, seed, after, count, **facts):
    found = cell(arm, seed, after, config={"data": {"eval": "gsm8k"}, "rollout": {"max_new_tokens": 512}}, **facts)
    for point in found["evaluations"]:
        point["count"] = count
    return found


def test_a_cell_that_was_never_evaluated_is_not_of_another_policy():
    never = evaluated("a", 1, None, 1319, state="failed", error="OutOfMemoryError") | {"evaluations": []}
    found = compared(evaluated("a", 0, 0.30, 1319), never)
    assert found.evaluation.startswith("1319 questions of gsm8k") and ";" not in found.evaluation
    assert not any("policy" in note for note in found.notes)
    other = compared(evaluated("a", 0, 0.30, 1319), evaluated("b", 0, 0.30, 200))
    assert any("not evaluated under one policy" in note for note in other.notes)
    assert not other.pairs, "a difference of accuracies on other questions is none"
    assert len(compared(evaluated("a", 0, 0.30, 1319), evaluated("b", 0, 0.30, 1319)).pairs) == 1


def test_cells_beside_others_are_named_unless_all_were():
    beside, alone = cell("a", 0, 0.3, shared_device=True), cell("a", 1, 0.3)
    assert "Ran beside other cells on one device, and so counted without times: a-s0." in compared(beside, alone).notes
    found = compared(beside, cell("a", 1, 0.3, shared_device=True))
    assert found.notes == ("Every cell ran beside others on one device: all count without times.",)


def test_cells_of_another_version_are_named():
    cells = [cell("a", seed, 0.3, machine={"commit": commit * 40}) for seed, commit in enumerate("ffe")]
    assert "Made by several versions of the code: at fffffff 2 cells, at eeeeeee a-s2." in compared(*cells).notes
    assert not any("versions" in note for note in compared(*cells[:2]).notes)


def test_entropies_on_several_probe_sets_are_not_one_mean_in_silence():
    def probed(arm, seed, first, step=1.0):
        return cell(arm, seed, 0.3, curves={"probe/entropy_conditional/by_token": [[step, 21.0], [first, 0.3]]})

    alike = [probed("a", 0, 0.4412), probed("a", 1, 0.4415), probed("b", 0, 0.4581)]
    assert not any("probe" in note for note in compared(*alike).notes), "other arithmetic, and another arm"
    found = compared(*alike, probed("b", 1, 0.4682)).notes
    assert (
        "Entropies on the probe set are of several sets and do not compare: seeds differ before training in B." in found
    )
    later = compared(probed("a", 0, 0.44), probed("a", 1, 0.35, step=21.0), cell("a", 2, 0.3))
    assert not any("probe" in note for note in later.notes), "not scored before training, or not at all"


def test_two_shared_seeds_have_no_verdict():
    """Two differences that happen to be alike make an interval of no width: +1.6 [+1.6, +1.6] was called higher."""
    cells = [cell("a", 0, 0.30), cell("a", 1, 0.32), cell("b", 0, 0.316), cell("b", 1, 0.3361)]
    (pair,) = compared(*cells).pairs
    assert pair.over_seeds.low > 0.01 and pair.verdict == "two seeds"
    (pair,) = compared(*cells, cell("a", 2, 0.31), cell("b", 2, 0.3262)).pairs
    assert pair.verdict == "higher"


def test_all_seeds_count_where_the_scatter_is_pooled():
    """Scatters .01 and .02 with 2 and 1 degrees of freedom; a third arm of one seed adds none. sd sqrt((2 + 2) / 3) points, t 3.182."""
    cells = [cell("a", seed, after) for seed, after in enumerate((0.30, 0.31, 0.32))]
    cells += [cell("b", 3, 0.34), cell("b", 4, 0.36), cell("c", 0, 0.9)]
    found = compared(*cells)
    row = row_of(found, "B − A")
    assert row["Over shared seeds, points"] == "–" and row["Verdict"] == "no finished seed in common"
    sd = ((2 * 0.01**2 + 0.02**2 / 2) / 3) ** 0.5
    half = 3.1824 * sd * (1 / 3 + 1 / 2) ** 0.5
    (pair,) = found.pairs
    assert (pair.pooled.sd, pair.pooled.freedom) == (pytest.approx(sd), 3)
    assert (pair.pooled.mean, pair.pooled.low) == (pytest.approx(0.04), pytest.approx(0.04 - half, abs=1e-5))
    column = f"Over all seeds, scatter pooled (sd {100 * sd:.1f}, 3 degrees of freedom), points"
    assert row[column] == f"+4.0 [+{4 - 100 * half:.1f}, +{4 + 100 * half:.1f}]"


def test_what_was_there_before_training_is_told_apart():
    def begun(arm, right):
        found = cell(arm, 0, 0.5, right="1100")
        return found | {"questions": found["questions"] | {"before": {"ids": IDS, "samples": 1, "right": right}}}

    (pair,) = compared(begun("a", "1110"), begun("b", "1000")).pairs
    assert pair.before.mean == pytest.approx(-0.5) and pair.before.low <= -0.5 <= pair.before.high
    (pair,) = compared(begun("a", "1110"), begun("b", "1110")).pairs
    assert pair.before is None, "one model"


def test_signal_is_told_of_the_first_and_the_last_tenth_of_the_steps():
    mixed = [0.5, 0.5, *[0.6] * 16, 0.7, 0.9]
    curves = {
        "groups/mixed": [list(range(1, 21)), mixed],
        "probe/entropy_conditional/by_token": [[1, 21], [0.45, 0.35]],
    }
    open_cell = cell("a", 1, None, state="running", curves={"groups/mixed": [[1, 2], [0.0, 0.0]]})
    found = compared(cell("a", 0, 0.3, curves=curves), open_cell, cell("b", 0, 0.3))
    lines = markdown([found]).splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("| First → last"))
    row = dict(zip(cells_of(lines[at]), cells_of(lines[at + 2]), strict=True))
    assert row["Mixed groups"] == "50.0 → 80.0 %" and row["Entropy on the probe set"] == "0.450 → 0.350"
    assert row["Mixed groups, all steps"] == "61.0 %", "of the run that made all its steps, as the tenths are"
    assert lines[at + 3] == "", "an arm without curves has no line"


def test_what_can_be_detected_is_said_for_the_seeds_that_there_are():
    """(t_.975 + t_.8) sd sqrt(1/n1 + 1/n2): 3 degrees of freedom of 3 and 2 seeds, (3.182 + .978) .01 sqrt(5/6)."""
    cells = [cell("a", seed, 0.30 + 0.01 * seed) for seed in range(3)] + [cell("b", seed, 0.32) for seed in range(2)]
    found = compared(*cells, cell("b", 2, None, state="running"))
    assert found.pairs[0].detectable_now == pytest.approx(4.160 * 0.01 * (5 / 6) ** 0.5, abs=1e-5)
    assert row_of(found, "B − A")["Detectable, planned (finished) seeds"] == "3.0 (3.8)"
    assert "stated to be detectable: 3.0, with the seeds so far 3.8" in render_arms([found])
    assert row_of(compared(*cells[:4]), "B − A")["Detectable, planned (finished) seeds"] == "3.0 (–)"


def test_questions_are_compared_where_they_are_the_same_ones():
    """Seed 2 of one arm alone has a result; another set of questions has no paired difference at all."""
    cells = [cell("a", 0, 0.50, right="1100"), cell("a", 1, 0.50, right="1010"), cell("a", 2, 0.75, right="1110")]
    cells += [cell("b", 0, 0.75, right="1110"), cell("b", 1, 0.25, right="1000"), cell("b", 2, None, state="stopped")]
    (pair,) = compared(*cells).pairs
    assert (pair.questions, len(pair.tests)) == (4, 2)
    assert [(test.gained, test.lost) for test in pair.tests] == [(1, 0), (0, 1)]
    assert pair.question_difference == pytest.approx(0.0) and pair.over_seeds.values == pytest.approx((0.25, -0.25))
    cells[3] = cell("b", 0, 0.75, right="1110", ids="f" * 16)
    (pair,) = compared(*cells).pairs
    assert (pair.questions, pair.tests, pair.question_difference) == (0, (), None)


def test_accuracy_under_noise_is_told_with_its_difference_to_the_clean_one():
    """Question by question of each run: two of four lost, then one; the mean is of runs."""
    noisy = {"accuracy": 0.5, "policy": {"noise": {"sigma": 0.05}}}
    cells = [cell("a", seed, 1.0, right="1111", final={"noisy": noisy}) for seed in range(2)]
    for found, right in zip(cells, ("1010", "1110"), strict=True):
        found["questions"]["noisy"] = {"ids": IDS, "samples": 1, "right": right}
    # Mean .375 of .5 and .25; standard error .125 times 12.706.
    assert row_of(compared(*cells), "A")["noisy − clean, points"] == "−37.5 [−196.3, +121.3]"


def test_answers_of_which_none_could_be_scored_in_both_are_no_division_by_zero():
    (pair,) = compared(cell("a", 0, 0.0, right="-1"), cell("b", 0, 0.0, right="1-")).pairs
    assert pair.question_difference is None and pair.questions == 0


def reaching(arm, seed, after, seconds):
    found = cell(arm, seed, after, shared_device=seconds is None)
    found["evaluations"][-1] |= {"train_seconds": seconds, "tokens": 1000 + seed}
    return found


def test_a_target_that_cells_without_times_have_reached_is_reached():
    """It was called not reached, for what it took is not known; what tokens it took is."""
    found = compared(reaching("a", 0, 0.46, None), reaching("a", 1, 0.47, None), reaching("a", 2, 0.30, None))
    row = found.arms[0].target["device_seconds"]
    assert (row.value, row.above, row.reached, row.count) == (None, None, 2, 3)
    assert row_of(found, "A")["seconds of training (CPU) to 45 %"] == "reached, time unknown (2 of 3)"
    assert found.arms[0].target["tokens"].value == 1001
    alone = compared(reaching("a", 0, 0.46, 700.0), reaching("a", 1, 0.47, 800.0), reaching("a", 2, 0.30, 850.0))
    assert row_of(alone, "A")["seconds of training (CPU) to 45 %"] == "800 (2 of 3)"
    late = compared(reaching("a", 0, 0.46, 950.0))
    assert row_of(late, "A")["seconds of training (CPU) to 45 %"].endswith("(0 of 1)"), "beyond the budget"


def timed(arm, after, seconds):
    facts = {"train_seconds": seconds, "peak_memory": {"of": "process, resident", "bytes": 1e9}}
    return cell(arm, 0, after, **facts)


def test_one_arm_alone_with_times_is_on_no_front():
    """The others shared their device: it was called the front, though nothing is known of them."""
    alone = compared(timed("a", 0.30, 100.0), timed("b", 0.40, None))
    assert not any(arm.on_front for arm in alone.arms) and "Accuracy, time and memory" not in render_arms([alone])
    both = compared(timed("a", 0.30, 100.0), timed("b", 0.40, 90.0))
    assert [arm.on_front for arm in both.arms] == [False, True] and "Accuracy, time and memory" in render_arms([both])

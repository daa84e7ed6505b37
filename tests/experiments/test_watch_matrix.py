"""Watching the cells of a matrix."""

from __future__ import annotations

import io
import json

from rich.console import Console

from qerl.experiments.manifest import Manifest, work_folder
from qerl.experiments.watch import QUIET_SECONDS, is_matrix, watch_matrix
from qerl.metrics.run_lock import RunLock


def console(*, terminal=False):
    return Console(file=io.StringIO(), width=150, force_terminal=terminal, color_system=None, highlight=False)


def write_lines(folder, name, rows):
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


FIRST = {"step": 0, "eval/accuracy": 0.25, "time/elapsed": 30.0}
STEP = {"step": 1, "reward": 0.5, "entropy": 0.3, "aqn/sigma": 0.01, "time/step": 2.5, "time/elapsed": 33.0}
LAST = {"step": 2, "reward": 0.6, "time/step": 3.5, "time/elapsed": 40.0, "eval/accuracy": 0.5}


def test_cells_are_followed_until_all_are_over(tmp_path):
    manifest = Manifest(tmp_path)
    manifest.set_state("a-s0", "running", shared_device=True)
    manifest.note("b-s0", problem="no such format")
    assert is_matrix(tmp_path) and not is_matrix(tmp_path / "a-s0")
    shown = console()
    looks = []
    with RunLock(work_folder(tmp_path, "a-s0")):

        def sleep(seconds):
            looks.append(seconds)
            write_lines(tmp_path, "a-s0", [FIRST, STEP, LAST][: len(looks)])
            if len(looks) == 4:
                manifest.set_state("a-s0", "finished")

        assert watch_matrix(tmp_path, console=shown, every=0.5, sleep=sleep) == "finished"
    assert looks == [0.5] * 4
    lines = shown.file.getvalue().splitlines()
    assert lines == [
        "a-s0: running",
        "b-s0: invalid",
        "a-s0: running, step 0, held-out 25.0%, time 30s",
        "a-s0: running, step 2, reward 0.600, held-out 25.0% → 50.0%, s a step 3.00*, time 40s",
        "a-s0: finished, step 2, reward 0.600, held-out 25.0% → 50.0%, s a step 3.00*, time 40s",
    ]


def test_a_folder_of_results_is_shown_from_its_summaries(tmp_path):
    """Committed results have no metrics file: a line a cell is made of the curves and evaluations that were kept."""
    Manifest(tmp_path).set_state("a-s0", "stopped")
    summary = {
        "curves": {
            "reward": [[1.0, 2.0], [0.5, 0.6]],
            "time/step": [[1.0, 2.0], [2.5, 3.5]],
            "entropy": [[1.0], [0.3]],
        },
        "evaluations": [{"step": 0, "accuracy": 0.25}, {"step": 2, "accuracy": 0.5}],
        "wall_seconds": 40.0,
        "shared_device": True,
    }
    (tmp_path / "a-s0").mkdir()
    (tmp_path / "a-s0" / "summary.json").write_text(json.dumps(summary))
    table = console()
    assert watch_matrix(tmp_path, once=True, console=table) is None
    row = next(line for line in table.file.getvalue().splitlines() if "a-s0" in line)
    assert row.split() == ["a-s0", "stopped", "2", "0.600", "25.0%", "→", "50.0%", "3.00*", "40s"]


def test_a_matrix_without_a_cell_at_work_has_stopped_and_once_shows_a_table(tmp_path):
    manifest = Manifest(tmp_path)
    manifest.set_state("a-s0", "running")
    manifest.set_state("b-s0", "waiting")
    write_lines(tmp_path, "a-s0", [FIRST, STEP])
    shown, now = console(terminal=True), [0.0]

    def sleep(seconds):
        now[0] += 25.0

    assert watch_matrix(tmp_path, console=shown, clock=lambda: now[0], sleep=sleep) == "stopped"
    assert QUIET_SECONDS < now[0] <= QUIET_SECONDS + 25.0
    table = console()
    assert watch_matrix(tmp_path, once=True, console=table) is None
    row = next(line for line in table.file.getvalue().splitlines() if "a-s0" in line)
    assert row.split() == [*("a-s0", "stopped", "1", "0.500", "0.300", "25.0%", "2.50", "33s")]
    assert "1 stopped, 1 waiting" in table.file.getvalue()

"""Damaged files of a matrix folder: one message that names file and place, and no table."""

import errno
import json
from pathlib import Path

import pytest
from fake_cells import write_fake_matrix
from typer.testing import CliRunner

from qerl.cli import app
from qerl.errors import OutputError, RunFolderError
from qerl.experiments import one_cell
from qerl.experiments.folders import export_summaries, read_cells
from qerl.experiments.stored import check_summary, manifest_damage
from qerl.metrics.run_dir import RunDir

CELL = "nvfp4-s0/summary.json"
RESULTS = Path(__file__).resolve().parents[2] / "results"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_fake_matrix(tmp_path_factory.mktemp("stored"))


@pytest.mark.parametrize(
    ("file", "place", "value"),
    [
        (CELL, ("evaluations",), None),
        (CELL, ("evaluations", 0), "x"),
        (CELL, ("evaluations", 0, "accuracy"), float("nan")),
        (CELL, ("evaluations", 1, "step"), 0),
        (CELL, ("evaluations", 1, "accuracy"), 1.5),
        (CELL, ("curves", "reward", 1), [0.5]),
        (CELL, ("curves", "reward", 1, 0), "x"),
        (CELL, ("curves", "reward"), [[], []]),
        (CELL, ("questions", "after", "samples"), 0),
        (CELL, ("questions", "after", "right"), "1x"),
        (CELL, ("final",), []),
        (CELL, ("steps",), None),
        ("matrix.json", ("cells", "nvfp4-s0", "seed"), "x"),
        ("matrix.json", ("plan", "arms", 0), "x"),
        ("matrix.json", ("plan", "detect", "power"), 1.0),
        ("matrix.json", ("detectable", 0), "x"),
        ("matrix.json", ("plan",), "x"),
    ],
)
def test_the_damaged_place_is_named(folder, file, place, value):
    whole = (folder / file).read_text()
    damaged = json.loads(whole)
    part = damaged
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    (folder / file).write_text(json.dumps(damaged))
    try:
        with pytest.raises(RunFolderError, match=f"is damaged.*{Path(file).name}: .*{place[0]}"):
            read_cells([folder])
        if value in (None, "x"):
            page = folder / "page.html"
            for command in (["results"], ["report", "--out", str(page)]):
                shown = CliRunner().invoke(app, [*command, str(folder)])
                assert (shown.exit_code, shown.stdout) == (2, "") and "is damaged" in " ".join(shown.stderr.split())
                assert "instance of" not in shown.stderr, "names of the program's own"
            assert not page.exists()
    finally:
        (folder / file).write_text(whole)


def test_what_earlier_versions_wrote_is_whole():
    found = list(RESULTS.glob("*/*/summary.json"))
    assert len(found) > 50
    for path in found:
        check_summary(path, json.loads(path.read_text()))
    for path in RESULTS.glob("*/matrix.json"):
        assert manifest_damage(json.loads(path.read_text())) is None


def test_a_full_disk_keeps_the_summary_that_was_there(folder, tmp_path, monkeypatch):
    collection = read_cells([folder])
    first, *_ = export_summaries(collection, tmp_path)
    before = first.read_bytes()
    assert json.loads(before) == json.loads((folder / "bf16-s0" / "summary.json").read_text()) | collection.cells[0]

    def write_half(path, text, encoding):
        path.write_bytes(text[: len(text) // 2].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(OutputError):
        export_summaries(collection, tmp_path)
    assert first.read_bytes() == before and [path.name for path in first.parent.iterdir()] == ["summary.json"]


def test_a_checkpoint_is_not_thrown_away_for_settings_that_are_lost(tmp_path):
    run = RunDir(tmp_path / "cell")
    run.checkpoint(3).mkdir(parents=True)
    with pytest.raises(RunFolderError, match=r"lost its settings.*checkpoint-3.*config\.resolved\.yaml"):
        one_cell._prepare(run)
    assert run.latest_checkpoint() is not None
    run.checkpoint(3).rmdir()
    assert one_cell._prepare(run) is False and not run.path.exists(), "a start that never saved"

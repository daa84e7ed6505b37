"""``qerl report``: one page about a run, or about several side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qerl.errors import ConfigError
from qerl.metrics.files import check_writable
from qerl.metrics.terminal import print_facts
from qerl.verbs.options import split_settings

REPORT_EXAMPLES = (
    "runs/demo",
    "runs/demo --target 0.8",
    "configs/demo.yaml --out demo.html",
    "runs/nvfp4 --baseline runs/bf16",
    "runs/bf16 runs/nvfp4 --out both.html",
    "runs/mechanism",
    "results/mechanism --step 30 --out mechanism.html",
    "results/mechanism results/ablations --against mechanism/nvfp4_aqn --out ablations.html",
)


def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN… | [CONFIG.yaml] [key=value …]",
            help="Run folders, finished or not, a folder of them, a matrix folder or one of results/; or what a run was started with.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Where to write; default report.html in the folder.")
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Of one run: state its speed-up over this one.")
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            metavar="ACCURACY", min=0, max=1, help="Accuracy set beforehand, as a fraction; a matrix has its own."
        ),
    ] = None,
    step: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Of several: as they were after step N, an early look.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="MATRIX/ARM", help="Of several matrices: compare the arms of the others with this arm of one."
        ),
    ] = None,
) -> None:
    """Write one self-contained HTML page about a run, or about several runs and the arms of a matrix."""
    if out is not None:
        check_writable(out)
    folders = [item for item in runs if "=" not in item]
    if not folders or folders[0].endswith((".yaml", ".yml")):
        from qerl.config.load import load_config

        config = load_config(*split_settings(runs))
        folders = [str(Path(config.run.dir) / config.run.name)]
    elif len(folders) < len(runs):
        raise ConfigError("run folders take no settings", got=" ".join(item for item in runs if "=" in item))
    from qerl.metrics.run_dir import RunDir

    if len(folders) == 1 and RunDir(folders[0]).holds_a_run():
        if step is not None or against is not None:
            name = "--step" if step is not None else "--against"
            raise ConfigError(f"{name} is for the report of several runs", got=folders[0])
        _report_of_one(Path(folders[0]), out, target, baseline)
        return
    if baseline is not None:
        raise ConfigError("--baseline is for the report of one run", got=" ".join(folders))
    from qerl.experiments.as_of import as_of_step
    from qerl.experiments.compare import compare_cells
    from qerl.experiments.folders import read_cells
    from qerl.report.arms import write_arms_report

    if len(folders) > 1 and out is None:
        raise ConfigError("a report of several runs needs a place", remedy="Add --out FILE.html")
    collection = read_cells([Path(folder) for folder in folders])
    collection = collection if step is None else as_of_step(collection, step)
    if against is not None:
        from qerl.experiments.against import against as with_reference

        collection = with_reference(collection, against)
    comparisons = compare_cells(collection, target=target)
    print_facts({"report": write_arms_report(comparisons, out or Path(folders[0]) / "report.html")})


def _report_of_one(run: Path, out: Path | None, target: float | None, baseline: Path | None) -> None:
    from qerl.report.collect import read_run
    from qerl.report.html import write_report
    from qerl.report.speedup import compare_speed, comparison_rows

    comparison = None
    if baseline is not None:
        comparison = compare_speed(read_run(run, samples=False), read_run(baseline, samples=False))
        print_facts(dict(comparison_rows(comparison)))
    print_facts({"report": write_report(run, out, target=target, baseline=comparison)})

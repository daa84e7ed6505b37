"""``qerl matrix`` and ``qerl results``: what they take and print. Free of torch until they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qerl.errors import ConfigError
from qerl.metrics.terminal import stderr

MATRIX_EXAMPLES = (
    "configs/matrix/demo_arms.yaml",
    "configs/matrix/mechanism.yaml --dry-run",
    "configs/matrix/mechanism.yaml --max-minutes 9 --out runs/mechanism",
    "configs/matrix/mechanism.yaml --cell nvfp4-s0",
    "configs/matrix/mechanism.yaml --jobs 4",
)
RESULTS_EXAMPLES = (
    "results/mechanism --step 30",
    "runs/mechanism --write results",
    "results/mechanism results/ablations --against mechanism/nvfp4_aqn",
)


def matrix(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="MATRIX.yaml [key=value …]", help="Matrix file, then settings for all its cells."),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the cells' run folders; default runs/NAME.")
    ] = None,
    cell: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this cell; may be repeated: they begin in this order."),
    ] = None,
    max_minutes: Annotated[
        float | None, typer.Option(metavar="M", min=0, help="Stop at a step boundary so as to end within M minutes.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and list all cells, and stop.")] = False,
    match: Annotated[bool, typer.Option("--match", help="Only find the temperatures that arms ask for.")] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Run failed cells again.")] = False,
    give_up: Annotated[
        bool,
        typer.Option(
            "--give-up", help="Count trials that the machine ended instead of running them again (best_recipe)."
        ),
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Run nothing if a cell is invalid.")] = False,
    one_process: Annotated[
        bool, typer.Option("--one-process", help="Run cells in this process: starts faster, shares memory and crashes.")
    ] = False,
    jobs: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Cells at one time, spread over the GPUs; those beside others count without times."
        ),
    ] = 1,
    portable: Annotated[
        bool,
        typer.Option(
            "--portable/--no-portable",
            help="Keep DIR/portable, to go on elsewhere: cells that ended, others as of their last checkpoint.",
        ),
    ] = True,
    started_by: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run the cells of a matrix, one after another or --jobs at one time; the same command goes on where it stopped.

    Invalid cells are listed before any work and the others run. Failed cells are kept and shown. Exit code 1 if there is
    one of either.
    """
    files = [item for item in arguments if "=" not in item]
    if len(files) != 1:
        raise ConfigError("one matrix file is needed", got=", ".join(files) or "none", remedy="Name it first")
    settings = [item for item in arguments if "=" in item]
    from qerl.experiments.choice import waiting_arms
    from qerl.experiments.plan import open_plan, plan_lines
    from qerl.experiments.runner import Orders, check_orders, run_matrix

    orders = Orders(
        only=tuple(cell or ()),
        max_minutes=max_minutes,
        one_process=one_process,
        jobs=jobs,
        retry=retry,
        give_up=give_up,
        strict=strict,
        match_only=match,
        portable=portable,
        started_by=started_by,
    )
    if dry_run:
        if match:
            raise ConfigError("a dry run finds no temperatures", got="--dry-run --match", remedy="Leave one out")
        plan = open_plan(Path(files[0]), settings, out)
        notes = [f"warning: {text}" for text in check_orders(plan, orders)]
        typer.echo("\n".join([*plan_lines(plan), *notes]))
        if any(item.problem is not None for item in plan.cells):
            raise typer.Exit(1)
        return
    # The matrix that has started this process does the talking.
    say = (lambda text: None) if orders.own_process else (lambda text: stderr().print(text, markup=False))
    plan = run_matrix(Path(files[0]), settings, out, orders, say)
    chosen = [item for item in plan.cells if not orders.only or item.name in orders.only]
    states = [plan.state(item) for item in chosen]
    if not orders.own_process:
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        typer.echo("\n".join([f"{plan.out}: {counts}", *waiting_arms(plan)]))
        if any(state not in ("waiting", "invalid") for state in states):
            typer.echo(f"the table: qerl results {plan.out}    a page: qerl report {plan.out}")
    if "failed" in states or any(item.problem is not None for item in chosen):
        raise typer.Exit(1)


def results(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR…", help="Matrix folders, or folders of results/.")],
    write: Annotated[
        Path | None,
        typer.Option(metavar="RESULTS", help="Write RESULTS/<matrix>/<cell>/summary.json for each cell."),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="As of step N, after which cells were evaluated: an early look."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="MATRIX/ARM", help="Compare the arms of the other matrices with this arm, which has their settings."
        ),
    ] = None,
) -> None:
    """Print the table of one or more matrices in Markdown, from the small summaries of their cells."""
    from qerl.experiments.as_of import as_of_step, common_steps
    from qerl.experiments.compare import compare_cells
    from qerl.experiments.folders import export_summaries, read_cells
    from qerl.experiments.table import markdown

    if write is not None and step is not None:
        raise ConfigError(
            "--write keeps whole summaries, whatever step is looked at",
            got=f"--step {step} --write {write}",
            remedy="Leave one out",
        )
    if against is not None:
        from qerl.experiments.against import against as with_reference

        if write is not None:
            raise ConfigError("--write keeps matrices as they are", got=f"--against {against} --write {write}")
        cells = read_cells(folders)
        typer.echo(markdown(compare_cells(with_reference(cells if step is None else as_of_step(cells, step), against))))
        return
    for folder in folders:
        cells = read_cells([folder])
        if write is not None:
            for path in export_summaries(cells, write):
                stderr().print(f"written: {path}", markup=False)
        typer.echo(markdown(compare_cells(cells if step is None else as_of_step(cells, step))))
        for at, count in common_steps(cells).items() if step is None else ():
            typer.echo(
                f"* {count} cell{'s' if count > 1 else ''} without a result yet: evaluated after step {at}. Add --step {at}."
            )

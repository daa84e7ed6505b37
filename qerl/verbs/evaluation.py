"""``qerl eval``: policies on suites, and two evaluations against each other."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from qerl.data.suites import SUITES, split_list
from qerl.errors import ConfigError
from qerl.metrics.files import check_writable, write_json
from qerl.metrics.terminal import print_facts, progress_bar, stderr, warn
from qerl.verbs.options import Adapter, Settings, as_settings, split_settings


def evaluate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_MODEL",
            help="Run folder, model folder, NAME under $QERL_MODELS, `demo`, or CONFIG.yaml.",
        ),
    ],
    settings: Settings = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="NAME,…",
            help="Suites and files, with commas between: "
            f"{', '.join(SUITES)}, arithmetic, calculations, a NAME under $QERL_DATA, a JSONL/parquet file, a hub name; NAME:split.",
        ),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="all | N,…", help="Checkpoints of the run, in one go; the newest if not given."),
    ] = None,
    adapter: Adapter = None,
    base: Annotated[
        bool, typer.Option("--base", help="The base without adapter; with --checkpoint, it and the checkpoints.")
    ] = False,
    samples: Annotated[
        int | None, typer.Option(metavar="N", help="Answers per question; above 1 needs a temperature.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    noise: Annotated[
        int, typer.Option("--noise", metavar="DRAWS", min=0, help="Also with noise, under so many keys.")
    ] = 0,
    sigma: Annotated[
        float | None, typer.Option(metavar="S", min=0.0, help="Level of --noise; the run's own if not given.")
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", help="Only the first N questions of each suite.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR | FILE.json",
            help="Also write evaluation.json and a parquet file of questions for each suite and policy; or all as one JSON. "
            "With --compare: the comparisons as JSON. What was written before is not replaced.",
        ),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Compare two evaluations instead: `qerl eval --compare A B`, each a folder or parquet file of --out, or a RUN or RUN:STEP.",
        ),
    ] = False,
) -> None:
    """Measure accuracy, with an interval over questions, of a run, its checkpoints, a model, or a model with an adapter.

    Every suite is a line of its own; no mean replaces them. Noise is off unless --noise asks for it beside the clean policy.
    A bare model is measured as it is stored, usually unquantized (bf16); quant.format=nvfp4 measures what training starts from.
    """
    if out is not None:
        check_writable(out, folder=out.suffix != ".json" and not compare)
        _refuse_earlier(out)
    if compare:
        others: dict[str, Any] = {
            "--data": data,
            "--checkpoint": checkpoint,
            "--adapter": adapter,
            "--base": base or None,
        }
        others |= {"--samples": samples, "--temperature": temperature, "--noise": noise or None, "--sigma": sigma}
        given = [name for name, value in (others | {"--limit": limit}).items() if value is not None]
        if given:
            raise ConfigError("--compare reads evaluations that are made already", got=" ".join(given))
        _compare(target, settings, out)
        return
    if sigma is not None and not noise:
        raise ConfigError("--sigma sets the level of --noise", got=f"--sigma {sigma:g}", remedy="Add --noise 1")
    if sigma == math.inf:
        raise ConfigError("--sigma is no level of noise", got=f"{sigma:g}", expected="a finite number, such as 0.01")
    config_file, overrides = split_settings(settings)
    flags = {"eval.samples": samples, "eval.temperature": temperature, "data.eval_limit": limit}
    from qerl.eval.files import Measurement, write_evaluations, write_questions
    from qerl.eval.table import table_lines
    from qerl.train.deployment import choose_targets, measure
    from qerl.train.fit import within_budget
    from qerl.train.noise.deployed import NoiseRequest

    targets = choose_targets(
        target,
        [*overrides, *as_settings(flags)],
        config_file=config_file,
        checkpoints=checkpoint,
        adapter=adapter,
        base=base,
    )
    # A configuration that evaluates with noise asks for it here too, beside the clean policy.
    draws = noise or int(targets[0][1].config.eval.noise)
    request = NoiseRequest(draws=draws, sigma=sigma) if draws else None
    suites = split_list(data) if data is not None else ()

    def keep(measurement: Measurement) -> None:
        """Of several, each as it is made: they may take long, and what is measured stays measured."""
        if len(suites) > 1 or len(targets) > 1 or request is not None:
            line = f"{measurement.suite}, {measurement.policy}: {measurement.result.headline()}"
            stderr().print(line, markup=False, highlight=False, soft_wrap=True)
        if out is not None and out.suffix != ".json":
            write_questions(out, measurement)

    with progress_bar() as on_progress, within_budget(targets[0][1].config):
        found = measure(
            targets,
            suites,
            noise=request,
            warn=warn,
            on_progress=on_progress,
            on_measured=keep,
        )
    config = targets[0][1].config
    first = found.measurements[0].result
    lines: dict[str, Any] = {
        "policy": f"{'; '.join(one.description for _, one in targets)} ({config.quant.format} base)",
        "protocol": first.protocol_line(),
    }
    for effect in found.effects:
        lines[f"{effect.policy} changes"] = (
            f"logits by up to {effect.max_logit_change:.3g}, KL from the base {effect.mean_kl:.3g} nats a token"
        )
    print_facts(lines)
    for line in table_lines(found.measurements):
        print(line)
    for spread in found.spreads:
        print(spread.line())
    for comparison in found.comparisons:
        print(comparison.line())
    if out is not None:
        facts = {"target": target, "policies": {name: one.description for name, one in targets}, **found.facts()}
        comparisons = [comparison.to_dict() for comparison in found.comparisons]
        if out.suffix == ".json":
            results = [measurement.facts() | {"rows": measurement.result.rows} for measurement in found.measurements]
            one = results[0] if len(results) == 1 else {"results": results, "comparisons": comparisons}
            write_json(out, {**facts, **one})
        else:
            write_evaluations(out, found.measurements, facts, comparisons)


def _refuse_earlier(out: Path) -> None:
    """An evaluation takes long, and one that was cut short has left the parquet files of what it measured.

    Raises:
        ConfigError: the file is there already, or the folder holds an evaluation.
    """
    from qerl.eval.files import holds_an_evaluation

    remedy = "Choose another --out, or delete it"
    if out.is_file():
        raise ConfigError("the file to write exists already", got=out, remedy=remedy)
    if holds_an_evaluation(out):
        raise ConfigError(
            "the folder already holds an evaluation", got=out, expected="a folder without one", remedy=remedy
        )


def _compare(first: str, others: list[str] | None, out: Path | None) -> None:
    """Two evaluations from disk against each other, suite by suite; ``out`` gets them as JSON."""
    if not others or len(others) != 1:
        raise ConfigError(
            "--compare takes two evaluations",
            got=" ".join([first, *(others or [])]),
            expected="qerl eval --compare FIRST SECOND",
        )
    from qerl.eval.compare import compare_stored, pair_up
    from qerl.eval.files import read_evaluations

    pairs = pair_up(read_evaluations(first), read_evaluations(others[0]))
    found = [compare_stored(one, other) for one, other in pairs]
    for comparison in found:
        print("\n".join(comparison.lines()))
    if out is not None:
        write_json(out, [comparison.to_dict() for comparison in found])

"""The command line: parse, build the configuration, call one function, print what came out.

Every verb takes ``[CONFIG.yaml] [key=value …]`` where it has settings. Whatever a user can get wrong ends in a message on
stderr and exit code 2, without a traceback. Modules that load torch are imported inside the commands, so that
``qerl --help`` answers at once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import rich
import typer
from rich.markup import escape
from typer.core import TyperGroup

from qerl.errors import ConfigError, KernelUnavailableError, QerlError, RunStopped, nearest
from qerl.metrics.files import system_refusal
from qerl.metrics.terminal import LastingStream, open_missing_streams, print_facts, progress_bar, stderr, warn
from qerl.signals import Signalled, Signals
from qerl.verbs.benching import bench
from qerl.verbs.evaluation import evaluate
from qerl.verbs.experiments import MATRIX_EXAMPLES, RESULTS_EXAMPLES, matrix, results
from qerl.verbs.export import export
from qerl.verbs.options import (
    Adapter,
    Base,
    Checkpoint,
    Data,
    Settings,
    Sigma,
    TargetArgument,
    as_settings,
    meant_as_argument,
    split_settings,
)
from qerl.verbs.planning import plan
from qerl.verbs.reporting import REPORT_EXAMPLES, report
from qerl.verbs.watching import watch

ENDED = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "the terminal closed"}
GO_ON = {
    "train": " before the first step; nothing was changed",
    "quantize": "; the same command goes on after the last whole layer",
}
ELSEWHERE = dict.fromkeys(
    ("chat", "serve"), "Other software serves what was trained: qerl export RUN --out DIR writes what it loads"
) | {"help": "qerl --help lists commands, and qerl COMMAND --help says what one takes"}
"""Commands that are asked for and are not there, with what to do instead."""

EXAMPLES = {
    "train": ("configs/demo.yaml", "configs/demo.yaml optim.lr=1e-4 run.name=low-lr", "configs/demo.yaml --resume"),
    "eval": (
        "runs/demo",
        "runs/demo --base --checkpoint all --data gsm8k,svamp,math500 --out evaluations/demo",
        "runs/demo --noise 3 --sigma 0.01",
        "SmolLM2-135M-Instruct --data gsm8k --limit 100 --samples 4 --temperature 1",
        "--compare runs/demo:0 runs/demo",
    ),
    "rollout": ("runs/demo --data arithmetic:test --n 8 --limit 64 --out samples",),
    "quantize": ("demo --out demo-nvfp4", "Qwen2.5-3B-Instruct --method best --calibration text.jsonl --out 3B-NVFP4"),
    "report": REPORT_EXAMPLES,
    "watch": ("runs/demo", "runs/demo --plain", "runs/demo --once"),
    "export": ("runs/demo --out served/adapter", "runs/demo --merge --weights trained --out served/model"),
    "bench": ("step --out step.json", "kernels --help"),
    "plan": ("configs/demo.yaml", "configs/bigmath_32b_nvfp4_aqn.yaml --gpu 48GB train.token_budget=9216"),
    "validate": ("configs/demo.yaml", "configs/demo.yaml data.train=gsm8k"),
    "env": ("", "configs/demo.yaml model.device=cpu"),
    "rescore": ("runs/demo --step 3", "runs/demo --rollout 2 --rows 0-7,12"),
    "matrix": MATRIX_EXAMPLES,
    "results": RESULTS_EXAMPLES,
}


def _examples(verb: str) -> str:
    """Text under a verb's help; blank lines keep each example on a line of its own."""
    return "\n\n".join(["[bold]Examples[/]", *(f"  qerl {verb} {arguments}" for arguments in EXAMPLES[verb])])


def _written_as_option(error: Exception) -> ConfigError | None:
    """The message for an option that is not there, of a verb that takes settings, if it was meant as one."""
    # By what the error holds: its class is click's or, in later versions of typer, typer's own.
    option = getattr(error, "option_name", None) if hasattr(error, "possibilities") else None
    command = getattr(getattr(error, "ctx", None), "command", None)
    taken = [parameter.metavar or "" for parameter in getattr(command, "params", ())]
    if option is None or not any("key=value" in metavar for metavar in taken):
        return None
    return meant_as_argument(option)


def _without_compiler(error: Exception) -> KernelUnavailableError | None:
    """The message for a launcher that Triton could not compile: it compiles some C on the host, with no error class of its own."""
    got: str | None = None
    if isinstance(error, RuntimeError) and str(error).startswith("Failed to find C compiler"):
        got = "no gcc or clang on the path"
    elif isinstance(error, subprocess.CalledProcessError) and any(str(word).endswith(".c") for word in error.cmd):
        got = f"exit code {error.returncode} of {error.cmd[0]}, whose words stand above"
    if got is None:
        return None
    return KernelUnavailableError(
        "Triton cannot compile the launchers of its kernels",
        got=got,
        expected="a C compiler and the headers of this Python (Python.h)",
        remedy="Install both (Debian and Ubuntu: apt install gcc python3-dev), name a compiler in CC, or use model.device=cpu",
    )


class _Commands(TyperGroup):
    """Turns signals and the errors that a user can cause into a message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        with Signals() as signals:
            try:
                return super().invoke(ctx)
            except RunStopped as stop:
                self._leave(str(stop), stop.exit_code)
            except KeyboardInterrupt as stop:
                self._end(ctx, stop.number if isinstance(stop, Signalled) else signal.SIGINT)
            except Exception as error:  # noqa: BLE001 (compiled code makes any error of a signal; what is not known is raised again)
                if signals.swallowed_by(error):
                    self._end(ctx, signals.signal_number or signal.SIGINT)
                self._refuse(error)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is named; one that is not there is a mistake like any other."""
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            close = nearest(args[0], self.commands)
            raise ConfigError(
                "there is no such command",
                got=args[0],
                expected=", ".join(self.commands),
                remedy=ELSEWHERE.get(args[0]) or (f"Did you mean {close}?" if close else None),
            )
        return super().resolve_command(ctx, args)

    def _end(self, ctx: Any, number: int) -> NoReturn:
        """After a signal; exit codes as shells have them: 130 after Ctrl-C, 143 after SIGTERM, 129 when the terminal closed."""
        self._leave(ENDED[signal.Signals(number)] + GO_ON.get(ctx.invoked_subcommand, ""), 128 + number)

    def _leave(self, text: str, code: int) -> NoReturn:
        """The last words after a signal. The terminal may be gone; then what is still buffered must not fail the exit code."""
        stderr().print(f"[yellow]{escape(text)}[/]", highlight=False, soft_wrap=True)
        LastingStream(sys.stdout).flush()
        raise typer.Exit(code) from None

    def _refuse(self, error: Exception) -> NoReturn:
        """What a user can cause, as a message; anything else is a fault of ours, which is raised again."""
        error = _written_as_option(error) or _without_compiler(error) or system_refusal(error) or error
        if not isinstance(error, QerlError):
            raise error
        stderr().print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(error.exit_code) from None


app = typer.Typer(
    name="qerl",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Reinforcement learning of language models on a frozen 4-bit base.\n\n"
    "Settings are YAML files and [bold]key=value[/] arguments; docs/config.md lists every key.",
)

Text = partial(typer.Option, metavar="FILE_OR_NAME")


@app.command(epilog=_examples("train"))
def train(
    settings: Settings = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint of the run folder.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved plan and stop.")] = False,
) -> None:
    """Train adapters with reinforcement learning; writes a run folder and an HTML report."""
    config_file, overrides = split_settings(settings)
    from qerl.config.load import load_config

    config = load_config(config_file, overrides)
    if dry_run:
        from qerl.train.plan import describe

        typer.echo(describe(config), nl=False)
        return
    from qerl.train.run import train as run_training

    run_training(config, resume=resume)


app.command("eval", epilog=_examples("eval"))(evaluate)


@app.command(epilog=_examples("rollout"))
def rollout(
    target: TargetArgument,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write; must not hold a run.")],
    settings: Settings = None,
    data: Data = None,
    n: Annotated[int | None, typer.Option("--n", min=1, help="Answers per prompt; default rollout.group_size.")] = None,
    checkpoint: Checkpoint = None,
    adapter: Adapter = None,
    base: Base = False,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; 0 is greedy.")] = None,
    sigma: Sigma = None,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Only the first N prompts.")] = None,
) -> None:
    """Sample and score answers; writes behavior records (tokens, log-probs, rewards) as parquet."""
    config_file, overrides = split_settings(settings)
    from qerl.train.fit import within_budget
    from qerl.train.standalone import sample_target
    from qerl.train.target import resolve_target

    given = as_settings({"data.train": data, "rollout.temperature": temperature})
    resolved = resolve_target(
        target, [*overrides, *given], config_file=config_file, checkpoint=checkpoint, adapter=adapter, base=base
    )
    with progress_bar() as on_progress, within_budget(resolved.config):
        asked: dict[str, Any] = {"samples": n, "limit": limit, "sigma": sigma}
        result = sample_target(resolved, **asked, out=out, warn=warn, on_progress=on_progress)
    accuracy = "nothing scorable" if result["accuracy"] is None else f"{100 * result['accuracy']:.1f} %"
    print_facts(
        {
            "policy": f"{resolved.description} ({resolved.config.quant.format} base)",
            "noise": result["noise"],
            "answers": f"{result['answers']}, accuracy {accuracy}",
            "speed": f"{result['tokens_per_second']:.0f} tokens/s ({result['generated_tokens']:.0f} tokens in {result['seconds']:.1f} s)",
            "records": result["path"],
        }
    )


@app.command(epilog=_examples("quantize"))
def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model folder, NAME under $QERL_MODELS, or `demo`.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write; must not exist.")],
    settings: Settings = None,
    weight_format: Annotated[str | None, typer.Option("--format", help="nvfp4, mxfp4; default quant.format.")] = None,
    method: Annotated[
        str | None, typer.Option(help="Quantizer (docs/nvfp4.md, 'Which method'); default quant.method, rtn.")
    ] = None,
    calibration: Annotated[str | None, Text(help="Text for awq, gptq and best, named as --data is.")] = None,
    calibration_count: Annotated[int, typer.Option(metavar="N", min=1, help="Sequences of it.")] = 256,
    calibration_length: Annotated[int, typer.Option(metavar="N", min=2, help="Tokens of each.")] = 2048,
    report_data: Annotated[str | None, Text(help="Text, or a rollout's parquet, to compare whole models on.")] = None,
    report_count: Annotated[int, typer.Option(metavar="N", min=1, help="Rows of it.")] = 64,
    report_length: Annotated[int, typer.Option(metavar="N", min=2, help="Tokens of each, at most.")] = 2048,
    text_fields: Annotated[str, typer.Option(metavar="A,B", help="Fields that hold text.")] = "question,solution",
    activations: Annotated[str, typer.Option(metavar="memory|disk", help="Where hidden states are.")] = "memory",
) -> None:
    """Write a quantized checkpoint in the compressed-tensors layout, layer by layer.

    Repeating an interrupted command goes on after the last whole layer. model.device and model.dtype say where layers run.
    """
    config_file, overrides = split_settings(settings)
    from qerl.config.load import load_config

    config = load_config(config_file, [*overrides, *as_settings({"quant.format": weight_format})])
    from qerl.model.checkpoint import resolve_model_path
    from qerl.quantize.command import quantize_command
    from qerl.quantize.report import facts, files_size, table
    from qerl.train.session import resolve_device

    with progress_bar("groups") as on_progress:
        quality = quantize_command(
            resolve_model_path(model),
            out,
            config,
            device=resolve_device(config.model.device),
            method=method,
            calibration=calibration,
            calibration_count=calibration_count,
            calibration_length=calibration_length,
            report_data=report_data,
            report_count=report_count,
            report_length=report_length,
            text_fields=text_fields,
            activations=activations,
            progress=lambda done, total, name: on_progress(done, total, 0),
        )
    print_facts({"written": out, "files": files_size(out), **facts(quality)})
    rich.print(table(quality))


app.command(epilog=_examples("report"))(report)
app.command(epilog=_examples("watch"))(watch)
app.command(epilog=_examples("export"))(export)
app.command(epilog=_examples("plan"))(plan)
app.command(
    epilog=_examples("bench"),
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)(bench)


@app.command(epilog=_examples("validate"))
def validate(settings: Settings = None) -> None:
    """Check before training: prompts, tokens that end an answer, scores of right and wrong answers, greedy answers."""
    config_file, overrides = split_settings(settings)
    from qerl.config.load import load_config
    from qerl.train.validate import validate as run_checks

    passed = True
    for check in run_checks(load_config(config_file, overrides)):
        passed = passed and check.passed
        typer.echo(f"{'ok  ' if check.passed else 'FAIL'}  {check.name}")
        for line in check.lines:
            typer.echo(f"      {line}")
    if not passed:
        raise typer.Exit(1)


@app.command(epilog=_examples("rescore"))
def rescore(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder with behavior records and kept adapters.")],
    settings: Settings = None,
    step: Annotated[int | None, typer.Option(metavar="N", help="Step of the run, from 1.")] = None,
    rollout: Annotated[
        int | None, typer.Option(metavar="N", help="Rollout instead; step N learned from N - 1.")
    ] = None,
    rows: Annotated[
        str | None, typer.Option(metavar="LIST", help="Rows of the record, as 0-9,12; all if not given.")
    ] = None,
) -> None:
    """Recompute the log-probs of recorded answers and compare; exit code 1 beyond the tolerance."""
    config_file, overrides = split_settings(settings)
    if config_file is not None:
        raise ConfigError("a run brings its own configuration", got=config_file, remedy="Give settings as key=value")
    from qerl.train.rescore import rescore as run_rescore

    result = run_rescore(run, overrides, step=step, rollout=rollout, rows=rows)
    limit = result.tolerance
    arithmetic = (
        result.dtype if result.kv_format == "compute" else f"{result.dtype}, rollout.kv_format={result.kv_format}"
    )
    print_facts(
        {
            "rollout": f"{result.rollout} (step {result.rollout + 1}), {result.rows} answers, {result.tokens} tokens",
            "noise": result.noise,
            "largest": f"{result.largest:.3g} nats ({result.worst})",
            "mean": f"{result.mean:.3g} nats; mean |difference of probabilities| {result.mean_abs_prob_difference:.3g}",
            "tolerance": f"largest {limit.largest:g}, mean {limit.mean:g} ({arithmetic})",
            "verdict": "within tolerance" if result.within else "BEYOND TOLERANCE",
        }
    )
    if not result.within:
        raise typer.Exit(1)


app.command("matrix", epilog=_examples("matrix"))(matrix)
app.command("results", epilog=_examples("results"))(results)


@app.command(epilog=_examples("env"))
def env(
    settings: Settings = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, as in a run's env.json.")] = False,
) -> None:
    """Print versions, machine and source commit, ready to paste into an issue.

    With a configuration or settings, also what they would use here: model, device, kernels, data.
    """
    from qerl.env_info import collect_env, env_text

    facts = collect_env()
    if settings:
        from qerl.config.load import load_config
        from qerl.train.plan import would_use

        facts["would_use"] = would_use(load_config(*split_settings(settings)))
    typer.echo(json.dumps(facts, indent=2) if as_json else env_text(facts))


def main() -> None:
    """Entry point of the ``qerl`` command."""
    # Threads that wait by spinning stall one another for seconds when the machine has other work; torch reads this at import.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    open_missing_streams()
    app()

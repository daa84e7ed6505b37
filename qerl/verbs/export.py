"""``qerl export``: a run's adapter, or the model with the adapter merged in, ready to be served."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from qerl.errors import ConfigError
from qerl.metrics.files import check_writable
from qerl.metrics.run_dir import RunDir
from qerl.metrics.terminal import print_facts, warn
from qerl.units import bytes_text

if TYPE_CHECKING:
    from qerl.config.schema import QuantConfig
    from qerl.train.export import Weights


def export(
    source: Annotated[
        str, typer.Argument(metavar="RUN|ADAPTER", help="Run folder, or an adapter folder in PEFT's format.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write; must not exist.")],
    merge: Annotated[
        bool, typer.Option("--merge", help="Write the whole model with the adapter in it, as BF16.")
    ] = False,
    weights: Annotated[
        str,
        typer.Option(
            metavar="plain|trained",
            help="What --merge adds the adapter to: the checkpoint's own weights, or the quantized ones it was trained on, dequantized.",
        ),
    ] = "plain",
    checkpoint: Annotated[
        int | None, typer.Option(metavar="N", help="Step of the run's checkpoint; the newest if not given.")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The base of an ADAPTER, if its own entry does not lead to it."),
    ] = None,
    base_name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What the adapter's base_model_name_or_path shall say, for publishing."),
    ] = None,
) -> None:
    """Write a PEFT folder for serving, or with --merge a Hugging Face checkpoint with adapter and trained norms merged in."""
    if weights not in ("plain", "trained"):
        raise ConfigError("--weights is not understood", got=weights, expected="plain or trained")
    if not merge and weights != "plain":
        raise ConfigError(
            "--weights says what --merge adds the adapter to", got=f"--weights {weights}", remedy="Add --merge"
        )
    if merge and base_name is not None:
        raise ConfigError("--base-name is for an adapter; a merged model has no base", got=f"--base-name {base_name}")
    if not merge and base is not None:
        raise ConfigError(
            "--base says what --merge starts from", got=f"--base {base}", remedy="Add --merge, or --base-name"
        )
    check_writable(out, folder=True)
    if out.exists():
        raise ConfigError("the folder to write exists already", got=out, remedy="Choose another --out, or delete it")
    if RunDir(source).holds_a_run():
        if base is not None:
            raise ConfigError("a run brings its own base", got=f"--base {base}")
        _export_run(source, out, merge=merge, weights=weights, checkpoint=checkpoint, base_name=base_name)
        return
    if checkpoint is not None:
        raise ConfigError("--checkpoint belongs to a run folder", got=source)
    from qerl.config.schema import QuantConfig
    from qerl.model.adapter_files import ADAPTER_CONFIG
    from qerl.model.checkpoint import resolve_model_path
    from qerl.model.spec import ModelSpec, read_json_object
    from qerl.train.export import export_adapter

    if not (Path(source) / ADAPTER_CONFIG).exists():
        raise ConfigError(
            "there is no run and no adapter here",
            got=source,
            expected=f"the folder of a run, such as runs/demo, or a folder with {ADAPTER_CONFIG}",
        )
    if not merge:
        print_facts({"adapter": export_adapter(source, out, base_name=base_name)})
        return
    named = base or read_json_object(Path(source), ADAPTER_CONFIG).get("base_model_name_or_path") or ""
    folder = resolve_model_path(named)
    stored = ModelSpec.from_folder(folder).stored_format
    if weights == "trained" and stored is None:
        raise ConfigError(
            "an adapter folder does not say how its base was quantized",
            got="--weights trained",
            remedy="Give the run folder, or leave --weights out",
        )
    _merge(
        folder,
        Path(source),
        out,
        quant=QuantConfig.model_validate({"format": stored or "bf16"}),
        weights=weights,
        origin=source,
    )


def _export_run(
    source: str, out: Path, *, merge: bool, weights: str, checkpoint: int | None, base_name: str | None
) -> None:
    from qerl.train.export import export_adapter, export_model
    from qerl.train.session import require_model_path
    from qerl.train.target import resolve_target

    target = resolve_target(source, checkpoint=checkpoint)
    config = target.config
    if target.adapter is None:
        if not merge:
            raise ConfigError(
                "a run of full mode has no adapter", got=target.description, remedy="Add --merge to copy its model"
            )
        if weights != "plain":
            raise ConfigError("a run of full mode trained its weights themselves", got=f"--weights {weights}")
        print_facts({"model": export_model(require_model_path(config), out), "of": target.description})
        return
    if not merge:
        print_facts({"adapter": export_adapter(target.adapter, out, base_name=base_name), "of": target.description})
        if config.lora.train_norms:
            warn(
                "the adapter holds trained norms (modules_to_save), which transformers with PEFT loads and vLLM refuses: "
                "serve it there with --merge, or train with lora.train_norms=false"
            )
        return
    if weights == "plain" and config.quant.format != "bf16":
        warn(
            f"the adapter was trained on {config.quant.format} weights and is merged into the plain ones: another policy. "
            f"Measure it (`qerl eval {out} --data {config.data.eval or 'FILE'}`), or add --weights trained"
        )
    _merge(
        require_model_path(config),
        target.adapter,
        out,
        quant=config.quant,
        weights=weights,
        origin=target.description,
    )


def _merge(base: Path, adapter: Path, out: Path, *, quant: QuantConfig, weights: str, origin: str) -> None:
    from qerl.train.export import merge

    facts = {"of": origin, "base": base.name, "base_format": quant.format, "method": quant.method}
    done = merge(base, adapter, out, quant=quant, weights=cast("Weights", weights), facts=facts)
    print_facts(
        {
            "model": done.path,
            "of": origin,
            "merged": f"{done.projections} projections, {done.norms} norms into "
            + ("the plain weights" if weights == "plain" else f"the dequantized {quant.format} weights"),
            "size": f"{bytes_text(done.bytes)} in {done.files} file{'s' if done.files > 1 else ''}",
        }
    )

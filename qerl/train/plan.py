"""What a run would do, from everything but the weights: the text of ``--dry-run``, and what ``qerl env`` adds."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from qerl import memory
from qerl.config.load import dump_config
from qerl.config.schema import Config
from qerl.kernels import dispatch
from qerl.metrics.files import check_writable
from qerl.model.aqn import stage_sigma
from qerl.model.checkpoint import check_targets
from qerl.model.spec import ModelSpec
from qerl.model.storage import check_formats
from qerl.model.tokenizer import Tokenizer, load_tokenizer
from qerl.reward.compose import Rewarder
from qerl.train.diagnostics.probe import read_probe
from qerl.train.fit import memory_text
from qerl.train.prompts import load_prompts
from qerl.train.run import check_trainable, noise_line
from qerl.train.session import check_lengths, fit_lengths, require_model_path, resolve_device
from qerl.train.warnings import config_warnings, cpu_warnings, prompt_warnings, size_warnings
from qerl.units import bytes_text


def describe(config: Config, *, width: int = 100) -> str:
    """The resolved plan as text: all settings, then sizes, schedule, predicted memory and warnings. Reads no weights and writes nothing.

    Raises:
        QerlError: whatever would stop the run before its first step, apart from its weights and an older run in its folder.
    """
    check_trainable(config)
    check_writable(Path(config.run.dir) / config.run.name, folder=True)
    folder = require_model_path(config)
    spec = ModelSpec.from_folder(folder)
    config, notes = fit_lengths(config, spec)
    check_lengths(config, spec)
    if config.train.mode == "lora":
        check_targets(spec, config.lora)
    check_formats(spec, config.quant)
    device = resolve_device(config.model.device)
    budget = memory.budget_of(config, device)
    asked = config
    config = memory.resolve(asked, spec, budget, device_type=device.type)
    Rewarder(config.reward, config.rollout.max_new_tokens).close()
    tokenizer = load_tokenizer(folder)
    if config.diagnostics.probe is not None:
        read_probe(config.diagnostics.probe, tokenizer, spec)
    data, found = _data(config, tokenizer, spec)
    out = StringIO()
    console = Console(file=out, width=width, highlight=False, emoji=False)
    console.print("settings, as they would be written to the run folder:", markup=False)
    console.print(dump_config(config), markup=False)
    console.print(_work_table(config, spec, data))
    if config.aqn.enabled:
        console.print(_noise_table(config))
    text = memory_text(config, spec, budget, device_type=device.type, asked=asked, width=width)
    console.print(text, markup=False, end="")
    slow = cpu_warnings(config, spec, device.type)
    for text in [*notes, *found, *slow, *config_warnings(config)]:
        console.print(f"warning: {text}", markup=False)
    return out.getvalue()


def would_use(config: Config) -> dict[str, Any]:
    """What a configuration would use on this machine, JSON-ready; names as they were given, no paths of the machine.

    Raises:
        QerlError: no such model, or no such device.
    """
    facts: dict[str, Any] = {"model": None}
    if config.model.path is not None:
        spec = ModelSpec.from_folder(require_model_path(config))
        facts["model"] = f"{config.model.path} ({spec.architecture}, {spec.num_layers} layers, {spec.hidden_size} wide)"
    device = resolve_device(config.model.device)
    return {
        **facts,
        "device": str(device),
        "dtype": config.model.dtype,
        "base": config.quant.storage(config.quant.format),
        "kernels": " ".join(f"{op}={dispatch.resolve(op, device)}" for op in dispatch.OPERATIONS),
        "train data": config.data.train,
        "eval data": config.data.eval,
        "backends": " ".join(config.log.backends),
    }


def _data(config: Config, tokenizer: Tokenizer, spec: ModelSpec) -> tuple[dict[str, str], list[str]]:
    """Rows of the plan about the data, and warnings about it."""
    prompts, dropped, found = load_prompts(config, tokenizer, config.data.train, "train", None, training=True)
    rows = {"training prompts": f"{len(prompts):,} of {config.data.train}, {dropped} left out as too long"}
    if config.data.eval is not None:
        questions, _, notes = load_prompts(config, tokenizer, config.data.eval, "test", config.data.eval_limit)
        rows["held-out questions"] = f"{len(questions):,} of {config.data.eval}"
        found = [*found, *notes]
    bare = prompt_warnings(prompts, config.data.prompt_template)
    return rows, [*found, *bare, *size_warnings(config, spec, prompts=len(prompts))]


def _work_table(config: Config, spec: ModelSpec, data: dict[str, str]) -> Table:
    rollout = config.rollout
    answers = rollout.prompts_per_step * rollout.group_size
    rounds = config.objective.dynamic_sampling_max_rounds if config.objective.dynamic_sampling else 1
    trained = {owner: sum(sizes) for owner, sizes in memory.trained_tensors(spec, config).items()}
    kept_bytes = memory.policy_bytes(spec, config)
    every = config.train.save_adapter_every
    kept = -(-config.train.steps // every) if isinstance(every, int) and every else 0
    table = Table(title="Plan", show_header=False)
    for name, value in (
        *data.items(),
        (
            "answers a step",
            f"{rollout.prompts_per_step} prompts x {rollout.group_size} = {answers}"
            + (f", in up to {rounds} rounds" if rounds > 1 else ""),
        ),
        (
            "optimizer updates",
            f"{config.train.steps} steps x {config.optim.updates_per_rollout} = {config.planned_updates}",
        ),
        ("answer tokens, at most", f"{answers * rounds * rollout.max_new_tokens:,} a step"),
        ("trained parameters", " + ".join(f"{count:,} {owner}" for owner, count in trained.items())),
        ("objective", _objective_line(config)),
        (
            "ratio",
            f"denominator {config.objective.denominator}, noise {config.objective.noise}, {_weight_line(config)}",
        ),
        (
            f"kept {'models' if config.train.mode == 'full' else 'adapters'} on disk",
            f"{kept} x {bytes_text(kept_bytes)} = {bytes_text(kept * kept_bytes)}",
        ),
    ):
        table.add_row(name, value)
    return table


def _objective_line(config: Config) -> str:
    objective = config.objective
    clips = f"clip {objective.clip_low} / {objective.clip_high}"
    dual = "" if objective.dual_clip == "off" else f", dual clip {objective.dual_clip}"
    kl = f", {objective.kl_coef:g} x {objective.kl_estimator}" if objective.kl_coef else ""
    return f"{objective.type}, {clips}{dual}{kl}, advantage {objective.advantage}"


def _weight_line(config: Config) -> str:
    objective = config.objective
    if objective.is_cap == "off":
        return "no importance weights"
    floor = "" if objective.is_floor == "off" else f" from {objective.is_floor}"
    return f"importance weights by {objective.is_level}, {objective.is_mode}{floor} at {objective.is_cap}"


def _noise_table(config: Config) -> Table:
    """Sigma by stage with the updates it covers."""
    aqn, planned = config.aqn, config.planned_updates
    level = "KL target" if aqn.magnitude == "kl" else "sigma"
    table = Table("stage", "updates completed", level, title=f"Noise: {noise_line(aqn)}")
    for stage in range(aqn.num_stages):
        first, after = -(-stage * planned // aqn.num_stages), -(-(stage + 1) * planned // aqn.num_stages)
        if first == after:
            continue
        table.add_row(str(stage), f"{first} to {after - 1}", f"{stage_sigma(aqn, stage):.6g}")
    return table

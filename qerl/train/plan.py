"""What a run would do, from the configuration and the model's ``config.json`` alone: the text of ``--dry-run``."""

from __future__ import annotations

from io import StringIO

from rich.console import Console
from rich.table import Table

from qerl import memory
from qerl.config.load import dump_config
from qerl.config.schema import Config
from qerl.model.aqn import stage_sigma
from qerl.model.spec import ModelSpec
from qerl.train.fit import memory_text
from qerl.train.run import check_trainable, noise_line
from qerl.train.session import check_lengths, require_model_path, resolve_device
from qerl.train.warnings import config_warnings

GB = 1e9


def describe(config: Config, *, width: int = 100) -> str:
    """The resolved plan as text: settings, schedule, sizes and predicted memory. Reads no weights and writes nothing.

    Raises:
        QerlError: whatever would stop the run before its first step, apart from the data.
    """
    check_trainable(config)
    spec = ModelSpec.from_folder(require_model_path(config))
    check_lengths(config, spec)
    device = resolve_device(config.model.device)
    budget = memory.budget_of(config, device)
    config = memory.resolve(config, spec, budget, device_type=device.type)
    out = StringIO()
    console = Console(file=out, width=width, highlight=False)
    console.print(dump_config(config), markup=False, end="")
    console.print(_work_table(config, spec))
    if config.aqn.enabled:
        console.print(_noise_table(config))
    console.print(memory_text(config, spec, budget, device_type=device.type, width=width), markup=False, end="")
    for text in config_warnings(config):
        console.print(f"warning: {text}", markup=False)
    return out.getvalue()


def _work_table(config: Config, spec: ModelSpec) -> Table:
    rollout = config.rollout
    answers = rollout.prompts_per_step * rollout.group_size
    rounds = config.objective.dynamic_sampling_max_rounds if config.objective.dynamic_sampling else 1
    trained = {owner: sum(sizes) for owner, sizes in memory.trained_tensors(spec, config).items()}
    kept_bytes = memory.policy_bytes(spec, config)
    every = config.train.save_adapter_every
    kept = -(-config.train.steps // every) if isinstance(every, int) and every else 0
    table = Table(title="Plan", show_header=False)
    for name, value in (
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
            f"{kept} x {kept_bytes / GB:.4f} GB = {kept * kept_bytes / GB:.3f} GB",
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

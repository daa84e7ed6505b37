"""Whether a run fits in memory, before any weight is read: the text of ``qerl plan`` and of the refusal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO

from rich.console import Console
from rich.table import Table

from qerl import memory
from qerl.config.schema import Config
from qerl.env_info import machine_memory
from qerl.memory import PHASES, Budget
from qerl.memory.ledger import kv_bytes, sequences_with_room, wanted_kv_bytes
from qerl.model.spec import ModelSpec
from qerl.train.session import check_lengths, fit_lengths, require_model_path, resolve_device
from qerl.units import bytes_text


def settle_memory(config: Config) -> Config:
    """The configuration with what ``auto`` leaves to the plan decided for its device.

    Raises:
        ConfigError: ``rollout.kv_cache_gb`` has no room for one sequence, or the CPU is to offload layer inputs.
        MemoryBudgetError: the plan exceeds the budget (``train.memory_budget``, or the device's memory).
    """
    device = resolve_device(config.model.device)
    spec = ModelSpec.from_folder(require_model_path(config))
    budget = memory.budget_of(config, device)
    settled = memory.resolve(config, spec, budget, device_type=device.type)
    # What would fit is worth its second only to those who are refused.
    refused = budget is not None and memory.predict(settled, spec, device_type=device.type).peak > budget.size
    text = memory_text(settled, spec, budget, device_type=device.type, asked=config) if refused else ""
    memory.check_budget(settled, spec, budget, device_type=device.type, text=text)
    return settled


@contextmanager
def within_budget(config: Config) -> Iterator[None]:
    """Within it the process keeps to ``train.memory_budget`` on the device of ``config`` (``memory.within_budget``). All that opens a session
    on a GPU for a user does so here: training with its evaluations; evaluations, rollouts, rescoring and checks by themselves.

    Raises:
        ConfigError: the device is not there.
        DeviceMemoryError: memory ran out.
    """
    with memory.within_budget(config, resolve_device(config.model.device)):
        yield


def plan(config: Config, *, gpu: str | None = None, width: int = 100) -> tuple[str, bool]:
    """The memory plan of a run as text, and whether it fits. Reads the model's ``config.json`` alone.

    Args:
        config: the run's configuration; of the model, ``model.path`` must hold a ``config.json``.
        gpu: memory of the GPU to plan for, such as ``24GB``, unless ``train.memory_budget`` is less; None plans for ``model.device``.
        width: columns of the text.

    Raises:
        ConfigError: no size, or what would stop the run before its first step.
        CheckpointError: no ``config.json``, or a model that is not supported.
    """
    spec = ModelSpec.from_folder(require_model_path(config, weights=False))
    config, _ = fit_lengths(config, spec)
    check_lengths(config, spec)
    if gpu is None:
        device = resolve_device(config.model.device)
        device_type, budget = device.type, memory.budget_of(config, device)
    else:
        device_type, budget = "cuda", memory.budget_of_size(config, gpu)
    settled = memory.resolve(config, spec, budget, device_type=device_type)
    peak = memory.predict(settled, spec, device_type=device_type).peak
    text = memory_text(settled, spec, budget, device_type=device_type, asked=config, width=width)
    if budget is None:
        return text, over_machine(config, peak, device_type) == 0
    return text, peak <= budget.size


def over_machine(config: Config, peak: int, device_type: str) -> int:
    """Bytes by which a plan for the CPU exceeds this machine's memory, 0 if it does not; with ``train.memory_budget=off`` nothing is too much."""
    size = machine_memory()
    if device_type != "cpu" or config.train.memory_budget == "off" or size is None:
        return 0
    return max(0, peak - size)


def memory_text(
    config: Config, spec: ModelSpec, budget: Budget | None, *, device_type: str, asked: Config, width: int = 100
) -> str:
    """The ledger by phase, the verdict, the largest sequences and lengths that fit, and what each setting buys.

    Args:
        config: resolved.
        asked: as it was before, which the settings that are advised can be added to.
    """
    ledger = memory.predict(config, spec, device_type=device_type)
    out = StringIO()
    console = Console(file=out, width=width, highlight=False, emoji=False)
    console.print(_ledger_table(ledger, device_type))
    console.print(_cache_line(config, spec, device_type), markup=False)
    console.print(
        f"checkpointing {config.train.checkpointing}; peak: {ledger.peak_phase}, {bytes_text(ledger.peak)}",
        markup=False,
    )
    if budget is not None:
        room = budget.size - ledger.peak
        takes_the_rest = asked.rollout.kv_cache_gb == "auto" and _is_cut(config, spec, device_type)
        verdict = f"fits, {bytes_text(room)} to spare" if room >= 0 else f"DOES NOT FIT, {bytes_text(-room)} too much"
        if room >= 0 and takes_the_rest:
            verdict = f"fits; keys and values take the rest ({bytes_text(kv_bytes(config, spec, device_type))})"
        console.print(f"budget: {bytes_text(budget.size)} ({budget.source}): {verdict}", markup=False)
        limits = memory.limits(config, spec, budget, device_type=device_type, asked=asked)
        if room < 0:
            advice = memory.together(asked, spec, budget, device_type=device_type)
            console.print(
                f"what would fit: {advice or _shorter_answers(limits, asked, spec, budget, device_type)}", markup=False
            )
        elif takes_the_rest:
            console.print("The plan counts tensors: the allocator may reserve more.", markup=False)
        console.print(_limits_table(limits))
    elif device_type == "cpu":
        console.print(_cpu_line(asked, ledger.peak), markup=False)
    options = memory.options(config, spec, budget, device_type=device_type, asked=asked)
    console.print(_options_table(options, ledger.peak))
    return out.getvalue()


def _cpu_line(config: Config, peak: int) -> str:
    """What there is in place of a budget on the CPU: the machine's own memory, beyond which no plan can go."""
    size = machine_memory()
    if over := over_machine(config, peak, "cpu"):
        return _too_large(over)
    known = "" if size is None else f" and this machine has {bytes_text(size)}"
    return f"budget: none, as this is a plan for the CPU{known}; qerl plan --gpu 24GB plans for a GPU of that size"


def machine_warnings(config: Config, spec: ModelSpec, device_type: str) -> list[str]:
    """What is said when a run begins on a CPU whose memory its plan exceeds; a budget that was asked for is held to before."""
    over = over_machine(config, memory.predict(config, spec, device_type=device_type).peak, device_type)
    return [_too_large(over)] if over else []


def _too_large(over: int) -> str:
    return (
        f"this machine has {bytes_text(machine_memory())}: DOES NOT FIT, {bytes_text(over)} too much; with train.memory_budget=GB "
        "the plan keeps within that, or says what would fit"
    )


def _ledger_table(ledger: memory.Ledger, device_type: str) -> Table:
    """Owners by phase; a dot where an owner is not there."""
    table = Table("owner", title=f"Predicted memory ({device_type}; 1 GB = 1e9 bytes)")
    for phase in PHASES:
        table.add_column(phase, justify="right")
    for name, size in ledger.resident.items():
        if size:
            later = name in memory.Ledger.after_load
            table.add_row(name, *("·" if later and phase == "load" else bytes_text(size) for phase in PHASES))
    for name in dict.fromkeys(name for brought in ledger.phases.values() for name in brought):
        sizes = [ledger.phases[phase].get(name, 0) for phase in PHASES]
        if any(sizes):
            table.add_row(name, *(bytes_text(size) if size else "·" for size in sizes))
    table.add_row("sum", *(bytes_text(ledger.total(phase)) for phase in PHASES), style="bold")
    return table


def _shorter_answers(
    limits: list[memory.Limit], asked: Config, spec: ModelSpec, budget: Budget, device_type: str
) -> str:
    """What to say where no settings that leave the answers as long as they are make the plan fit."""
    nothing = "no settings below together do, answers as long as they are"
    setting = "rollout.max_new_tokens"
    shorter = next(limit.largest for limit in limits if limit.setting == setting)
    if shorter is None or not memory.fits_with({setting: shorter}, asked, spec, budget, device_type=device_type):
        return nothing
    return f"{nothing}; {setting}={shorter} does"


def _is_cut(config: Config, spec: ModelSpec, device_type: str) -> bool:
    """Whether not all sequences have room at their longest."""
    return kv_bytes(config, spec, device_type) < wanted_kv_bytes(config, spec, device_type)


def _cache_line(config: Config, spec: ModelSpec, device_type: str) -> str:
    """Room for keys and values against what all sequences want at their longest."""
    size, wanted = kv_bytes(config, spec, device_type), wanted_kv_bytes(config, spec, device_type)
    line = f"keys and values: {bytes_text(size)}"
    if _is_cut(config, spec, device_type):
        room = sequences_with_room(config, spec, device_type)
        line += f" of {bytes_text(wanted)}, room for {room} of {config.decode_slots} sequences at their longest; the others wait"
    if device_type == "cuda":
        line += "; kept while training" if config.rollout.keep_cache != "off" else "; given back for training"
    return line


def _limits_table(limits: list[memory.Limit]) -> Table:
    table = Table("setting", "now", "most that fits", "held by", title="Largest of one setting, the others as they are")
    for limit in limits:
        now, largest, held_by = (
            f"{limit.now:,}",
            "none" if limit.largest is None else f"{limit.largest:,}",
            limit.held_by,
        )
        if limit.others_wait:
            now, largest, held_by = f"{now} asked for", f"{largest} at a time", f"{held_by}; the others wait"
        table.add_row(limit.setting, now, largest, held_by)
    return table


def _options_table(options: list[memory.Option], peak: int) -> Table:
    """Settings are never cut off: they are to be copied."""
    table = Table(title="What would need less, one at a time")
    table.add_column("setting", no_wrap=True)
    for name in ("peak", "less by", "then the peak is", "price"):
        table.add_column(name, overflow="fold")
    for option in options:
        change = option.change.replace(" ", "\n")
        table.add_row(change, bytes_text(option.peak), bytes_text(peak - option.peak), option.phase, option.price)
    return table

"""The end of a run: ``summary.json``, ``memory.json`` and the closing lines of the terminal."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from qerl import memory
from qerl.env_info import collect_env
from qerl.eval.evaluate import compare
from qerl.train import on_policy
from qerl.train.loop import Trainer

SUMMARY_SCHEMA = 1


def closing_lines(summary: dict[str, Any], folder: Path, report: str, again: str) -> dict[str, Any]:
    """What the terminal shows after the last step; ``again`` is the command that goes on with a stopped run."""
    lines: dict[str, Any] = {"status": f"{summary['status']} after step {summary['steps']}"}
    for moment in ("before", "after"):
        result = summary["evaluation"][moment]
        if result is not None:
            lines[f"accuracy {moment}"] = (
                f"{result['accuracy']:.1%} [{result['low']:.1%}, {result['high']:.1%}] on {result['count']} held-out questions"
            )
    noisy = summary["noisy"]
    if noisy is not None:
        against = noisy["against_clean"]
        lines["with noise"] = (
            f"{noisy['mean']:.1%} at sigma {noisy['sigma']:.3g}, {100 * against['difference']:+.1f} points "
            f"[{100 * against['low']:+.1f}, {100 * against['high']:+.1f}] from the clean policy"
        )
    lines |= {"seconds": f"{summary['wall_seconds']:.1f}", "run folder": folder, "report": report}
    if summary["status"] != "finished":
        lines["resume"] = again[:1].lower() + again[1:]
    return lines


def paired_difference(trainer: Trainer) -> dict[str, Any] | None:
    """The evaluation after against the one before on the same questions; None unless both were made."""
    results = [
        result for moment in ("before", "after") if (result := trainer.state.evaluations.get(moment)) is not None
    ]
    if len(results) < 2:
        return None
    before, after = (trainer.run.read_evaluation(result["step"]) for result in results)
    return dict(compare(before, after, confidence=trainer.config.eval.confidence, seed=trainer.config.train.seed))


def write_summary(trainer: Trainer, *, finished: bool) -> dict[str, Any]:
    """``summary.json`` and ``memory.json``."""
    config, state, session = trainer.config, trainer.state, trainer.session
    state.wall_seconds += time.perf_counter() - trainer.began
    peaks = memory.process_bytes() | memory.device_bytes(session.device) | trainer.timer.peaks.overall
    ledger = memory.predict(config, session.model.spec, device_type=session.device.type)
    measured = memory.measure_resident(
        session.model, masters=trainer.optimizer.masters.values(), moments=trainer.optimizer.state_tensors()
    ) | {"kv_cache": trainer.peak_kv_bytes}
    trainer.run.write_json(
        trainer.run.memory_path,
        {
            "predicted": ledger.owners(),
            "predicted_phases": {phase: dict(brought) for phase, brought in ledger.phases.items()},
            "predicted_peaks": {phase: ledger.total(phase) for phase in memory.PHASES},
            "measured_peaks": trainer.timer.peaks.run,
            "measured": measured,
            "by_owner": memory.held_against(ledger, measured, trainer.timer.peaks.run),
            "largest_pass": memory.held_against_its_tokens(config, session.model.spec, measured, trainer.timer.peaks),
            "process": peaks,
        },
    )
    summary = {
        "schema": SUMMARY_SCHEMA,
        "run": config.run.name,
        "model": config.model.path,
        "status": "finished" if finished else "interrupted",
        "steps": state.step,
        "updates": state.updates,
        "evaluation": {"before": state.evaluations.get("before"), "after": state.evaluations.get("after")},
        "evaluations": state.evaluations,
        "paired": paired_difference(trainer),
        # A run that was made longer still knows the end it had.
        "noisy": state.noisy if state.noisy is not None and state.noisy["step"] == state.step else None,
        "bit_exact": not state.portable,
        "portable_resumes": state.portable,
        "wall_seconds": state.wall_seconds,
        "stage_seconds": dict(trainer.timer.total),
        "on_policy": on_policy.verdict(state.off_policy, state.on_policy_steps, state.step),
        "tokens": {
            "total": state.tokens,
            "completion": state.completion_tokens,
            "prompt": state.tokens - state.completion_tokens,
        },
        "peak_memory": peaks,
        "versions": collect_env()["versions"],
        "warnings": state.warnings,
    }
    trainer.run.write_json(trainer.run.summary_path, summary)
    return summary

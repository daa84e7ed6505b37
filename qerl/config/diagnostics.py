"""The ``diagnostics`` section: how often a run is measured beyond what its steps give anyway."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from qerl.config.section import NonNegative, Positive, Section


class DiagnosticsConfig(Section):
    """Measurements that say whether a run is believable. They read the run and never change what it learns."""

    every: NonNegative = 10
    """Steps between measurements (entropy and information on the probe set, mismatch by cause, output perturbations), the first step included; 0 makes none."""
    canary: bool = True
    """At every update, before it is made: engine and trainer must agree on the step's own answers, adapters and noise must move the log-probs of one of them in the trainer, and the engine's must make that move. After the first step, every tenth and the last one probe prompt is answered and scored too, with and (not after the last) without adapters, to the bit. The run stops on a fault."""
    probe: str | None = None
    """A probe set of another run (its `probe.json`), so that entropies of several arms are taken at the same contexts; none makes one from the base model's own answers to the first held-out (else training) prompts."""
    probe_prompts: Positive = 8
    """Prompts of the probe set, one answer each; also the answers of a step that mismatch and information are measured on."""
    probe_tokens: Positive = 128
    """Longest answer of the probe set; longer ones, and those of a step, are cut here."""
    noise_draws: Annotated[int, Field(ge=2)] = 4
    """Noise draws M behind the conditional and the mixture entropy and the bounds of I(O;Z)."""

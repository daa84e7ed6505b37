"""Quantizing checkpoints on disk: streamed layer by layer, with or without calibration text, with a quality report."""

from qerl.quantize.driver import TextRequest, quantize_checkpoint
from qerl.quantize.folding import unfold_adapter

__all__ = ["TextRequest", "quantize_checkpoint", "unfold_adapter"]

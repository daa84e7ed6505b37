"""Quantizing checkpoints on disk: streamed, data-free (round to nearest), with a quality report."""

from qerl.quantize.driver import quantize_checkpoint

__all__ = ["quantize_checkpoint"]

"""Verbs of the command line that are too large for ``qerl.cli``, which registers them."""

"""qerl: reinforcement learning of language models whose frozen base weights are held in 4 bits.

Importing the package loads nothing heavy; import the part you need, e.g. ``from qerl.config.load import load_config``.
"""

__version__ = "0.1.0"

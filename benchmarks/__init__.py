"""Benchmarks of a source checkout: `python benchmarks/NAME.py`, or `qerl bench NAME`.

They import each other from this package, with the repository on the path and never this folder: its `kernels.py` would stand for
the package `kernels`, which transformers and bitsandbytes look for. So a file that is run as such puts the repository in the place of its folder.
"""

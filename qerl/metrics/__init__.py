"""What a run writes down: the catalogue of metrics, the run folder, the writers and the terminal display.

Nothing here imports torch, so a run folder can be read anywhere.
"""

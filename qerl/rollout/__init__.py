"""Generation: continuous batching over the trainer's own tensors.

`engine` runs the calls, `scheduler` decides which sequence holds which row of the decode batch, `sequence` holds the
state of the rows, `kv_cache` their keys and values, and `sampler` chooses the tokens.
"""

"""Generation: continuous batching over the trainer's own tensors.

`engine` takes the calls, and `call` runs one: `scheduler` decides which sequence holds which row of the decode batch, `prefill` computes
prompts, `workspace` has the memory and the step that advances the rows (`row_state`, `kv_cache`, `row_noise`, captured by
`cuda_graphs`), `sampler` chooses the tokens, and `transcript` keeps them.
"""

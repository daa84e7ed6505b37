"""One folder an operation: `__init__` is the public function, `reference` the plain torch implementation.

`dispatch` is the only place where an implementation is chosen. `philox` makes every random number of the program.
"""

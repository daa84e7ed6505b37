"""The memory ledger: bytes by owner and phase, predicted from shapes and the configuration, then measured.

Prediction needs no weights and no device. Owners are disjoint. 1 GB = 1e9 bytes.

* ``shapes``: sizes that depend on the model and the configuration alone;
* ``pages``: the least of keys and values;
* ``rows``: rows of the decode batch, and the noise kept for them;
* ``copies``: whether dequantized copies of weights are kept;
* ``budget``: how much memory a plan may take;
* ``ledger``: ``predict`` adds them up by phase;
* ``advice``: what a plan decides, does it fit, what would, and what each setting buys;
* ``limits``: the most of a setting that fits;
* ``bound``: the budget held to while a run works, and what to say when memory runs out;
* ``measure``: bytes of the tensors that exist, peaks by phase, and both against the prediction.
"""

from qerl.memory.advice import (
    Option,
    check_budget,
    fits_with,
    options,
    resolve,
    together,
)
from qerl.memory.bound import OUTSIDE, within_budget
from qerl.memory.budget import Budget, budget_of, budget_of_size
from qerl.memory.copies import settle_copies
from qerl.memory.ledger import PHASES, Ledger, check_cache, kv_bytes, predict
from qerl.memory.limits import Limit, limits
from qerl.memory.measure import (
    PhasePeaks,
    device_bytes,
    held_against,
    held_against_its_tokens,
    measure_resident,
    process_bytes,
    return_unused,
)
from qerl.memory.shapes import policy_bytes, trained_tensors, uses_dense_cache

__all__ = [
    "OUTSIDE",
    "PHASES",
    "Budget",
    "Ledger",
    "Limit",
    "Option",
    "PhasePeaks",
    "budget_of",
    "budget_of_size",
    "check_budget",
    "check_cache",
    "device_bytes",
    "fits_with",
    "held_against",
    "held_against_its_tokens",
    "kv_bytes",
    "limits",
    "measure_resident",
    "options",
    "policy_bytes",
    "predict",
    "process_bytes",
    "resolve",
    "return_unused",
    "settle_copies",
    "together",
    "trained_tensors",
    "uses_dense_cache",
    "within_budget",
]

"""Keyed random numbers: every draw is f(seed, stream name, counter), never the next number of a shared generator.

So a draw does not depend on what was drawn before it, on how many are drawn with it, or on the device: the words are
equal bit for bit everywhere, and normals are on one device (within 2e-6 between a CPU and a GPU). A counter is four 32-bit numbers
(c0, c1, c2, c3); one counter gives a block of four words. Where a function makes a vector, element i comes from the
block c0 = i // 4, word i % 4.

Streams with different names, or seeds, have unrelated keys.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from qerl.kernels import dispatch
from qerl.kernels.philox import reference
from qerl.kernels.philox.reference import Key, open_unit

__all__ = [
    "normal",
    "normal_rows",
    "normal_rows_of",
    "permutation",
    "philox4x32",
    "stream_key",
    "uniform",
    "uniform_at",
    "words",
]

_SHIFT = 1 << 31


def philox4x32(counter: Tensor, key: tuple[int, int]) -> Tensor:
    """Philox-4x32-10.

    Args:
        counter: int64 [..., 4], each in [0, 2^32).
        key: two integers in [0, 2^32).

    Returns:
        int64 [..., 4], the output words as non-negative numbers.
    """
    return reference.stack_words(counter.unbind(-1), key)


def stream_key(seed: int, stream: str) -> tuple[int, int]:
    """The 64-bit key of a named stream: a stable hash (BLAKE2b) of the whole seed and the name, as two words."""
    digest = hashlib.blake2b(f"{seed}:{stream}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def words(
    seed: int, stream: str, n: int, *, c1: int = 0, c2: int = 0, c3: int = 0, device: torch.device | str = "cpu"
) -> Tensor:
    """int64 [n] words in [0, 2^32)."""
    blocks = torch.arange(-(-n // 4), dtype=torch.int64, device=device)
    rest = tuple(torch.tensor(_checked(c), dtype=torch.int64, device=device) for c in (c1, c2, c3))
    return reference.stack_words((blocks, *rest), stream_key(seed, stream)).flatten()[:n]


def uniform(
    seed: int, stream: str, n: int, *, c1: int = 0, c2: int = 0, c3: int = 0, device: torch.device | str = "cpu"
) -> Tensor:
    """float32 [n], uniform on the open interval (0, 1): the midpoints of 2^23 equal cells, exact."""
    return open_unit(words(seed, stream, n, c1=c1, c2=c2, c3=c3, device=device)).float()


def uniform_at(
    seed: int,
    stream: str,
    c0: Tensor | int,
    c1: Tensor | int,
    c2: Tensor | int,
    c3: Tensor | int,
    *,
    kernel: str = "auto",
) -> Tensor:
    """float32, uniform on (0, 1), one value a counter: the first word of each block.

    Args:
        c0, c1, c2, c3: int64 tensors in [0, 2^32) that broadcast, or integers.
        kernel: implementation by name.

    Returns:
        The broadcast shape.
    """
    device = next((c.device for c in (c0, c1, c2, c3) if isinstance(c, Tensor)), torch.device("cpu"))
    counter = tuple(c if isinstance(c, Tensor) else torch.tensor(_checked(c), device=device) for c in (c0, c1, c2, c3))
    return dispatch.load("philox", device, kernel).uniform_at(stream_key(seed, stream), counter)


def normal(
    seed: int,
    stream: str,
    n: int,
    *,
    c1: int = 0,
    c2: int = 0,
    c3: int = 0,
    device: torch.device | str = "cpu",
    kernel: str = "auto",
) -> Tensor:
    """float32 [n], standard normal, by Box and Muller on the word pairs (0, 1) and (2, 3) of each block. |z| < 5.8.

    z_0 = sqrt(-2 ln u_0) cos(2 pi u_1),  z_1 = sqrt(-2 ln u_0) sin(2 pi u_1): on the CPU in float64, rounded once; on CUDA in
    float32, within 2e-6 of that.
    """
    first = torch.tensor([_checked(c1)], device=device)
    return normal_rows_of(stream_key(seed, stream), n, c1=first, c2=c2, c3=c3, kernel=kernel)[0]


def normal_rows(
    seed: int, stream: str, n: int, *, c1: Tensor | int, c2: Tensor | int, c3: Tensor | int, kernel: str = "auto"
) -> Tensor:
    """float32 [R, n], standard normal: row r is ``normal(seed, stream, n, c1=c1[r], c2=c2[r], c3=c3[r])``.

    Args:
        c1, c2, c3: int64 [R] in [0, 2^32), or integers; at least one is a tensor.
        kernel: implementation by name.
    """
    return normal_rows_of(stream_key(seed, stream), n, c1=c1, c2=c2, c3=c3, kernel=kernel)


def normal_rows_of(
    key: Key, n: int, *, c1: Tensor | int, c2: Tensor | int, c3: Tensor | int, kernel: str = "auto"
) -> Tensor:
    """`normal_rows` of a key that is given: two integers in [0, 2^32), or an int64 tensor [2] on the device.

    Counters may also be int64 [1], for all rows; R is the length of the longest.
    """
    for counter in (c1, c2, c3):
        assert isinstance(counter, Tensor) or _checked(counter) == counter
    device = next(c.device for c in (c1, c2, c3) if isinstance(c, Tensor))
    return dispatch.load("philox", device, kernel).normal_rows(key, n, c1, c2, c3)


def permutation(seed: int, stream: str, n: int, *, c1: int = 0, c2: int = 0, c3: int = 0) -> Tensor:
    """int64 [n]: a permutation of 0..n-1, the stable order of n 64-bit numbers (two words each)."""
    high, low = words(seed, stream, 2 * n, c1=c1, c2=c2, c3=c3).view(-1, 2).unbind(1)
    # The shift maps unsigned order to the signed order of int64.
    return torch.argsort(((high - _SHIFT) << 32) | low, stable=True)


def _checked(counter: int) -> int:
    assert 0 <= counter < 1 << 32, f"counter {counter} does not fit 32 bits"
    return counter

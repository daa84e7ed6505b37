"""Keys and values of the running sequences, one slab of fixed length a row.

Shape legend: S slots (the rows of the decode batch, then one spare), L longest sequence, K key/value heads, d head size,
T tokens, B running rows, M slots or tokens named in one call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qerl.kernels.attention import cached_attention
from qerl.model.attention import PackedSequences, SampleRows


class KVCache:
    """Slabs [S, L, K, d] of keys and of values, one pair a layer.

    Slots are zero at first: attention multiplies what lies beyond a sequence's end by zero, which must not meet a NaN.

    Args:
        layers: decoder layers.
        rows: rows of the decode batch; slot ``rows`` is the spare one.
        length: L, the most tokens of a sequence that are ever fed to the model.
        kv_heads: K.
        head_dim: d.
        dtype: of keys and values.
        device: where they lie.
    """

    def __init__(
        self,
        *,
        layers: int,
        rows: int,
        length: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        shape = (rows + 1, length, kv_heads, head_dim)
        self.spare = rows
        self.length = length
        self.slabs = [
            (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            for _ in range(layers)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.numel() * slab.element_size() for pair in self.slabs for slab in pair)

    def write(self, layer: int, k_MKd: Tensor, v_MKd: Tensor, place_M: Tensor) -> None:
        """Store M tokens at places slot * L + position (int64 [M], each once)."""
        for slab_SLKd, values_MKd in zip(self.slabs[layer], (k_MKd, v_MKd), strict=True):
            slab_SLKd.flatten(0, 1).index_copy_(0, place_M, values_MKd)

    def rows(self, layer: int, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Views [B, length, K, d] of the keys and values of the first ``count`` rows."""
        k_SLKd, v_SLKd = self.slabs[layer]
        return k_SLKd[:count, :length], v_SLKd[:count, :length]

    def copy(self, source_M: Tensor, target_M: Tensor, length: int) -> None:
        """Copy the first ``length`` positions of slots to other slots (int64 [M] each, disjoint)."""
        for pair in self.slabs:
            for slab_SLKd in pair:
                slab_SLKd[target_M, :length] = slab_SLKd[source_M, :length]


class PrefillContext:
    """Attention of a packed prefill pass: each prompt over itself; keys and values also go to the cache.

    Args:
        cache: where to.
        packed: bounds and positions of the prompts.
        source_M: int64 [M], token of the pass; a prompt that several rows share occurs once for each.
        place_M: int64 [M], where it goes (slot * L + position).
    """

    def __init__(self, cache: KVCache, packed: PackedSequences, source_M: Tensor, place_M: Tensor):
        self.positions_T = packed.positions_T
        self.samples = packed.samples
        self._cache, self._packed = cache, packed
        self._source_M, self._place_M = source_M, place_M

    def attend(self, layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        """Output of attention, same shape and dtype as ``q_THd``."""
        k_MKd, v_MKd = (values.index_select(0, self._source_M) for values in (k_TKd, v_TKd))
        self._cache.write(layer, k_MKd, v_MKd, self._place_M)
        return self._packed.attend(layer, q_THd, k_TKd, v_TKd)


class DecodeContext:
    """Attention of a decode step: one new token a row over the row's cache, the new token included.

    Args:
        cache: of all rows.
        lengths_B: int64 [B], tokens of each running row before this step, which is the position of its new token.
        longest: largest of ``lengths_B``, known to the host.
        samples: whose rows these are, for noise that differs between them.
    """

    def __init__(self, cache: KVCache, lengths_B: Tensor, longest: int, samples: SampleRows | None = None):
        self.positions_T = lengths_B
        self.samples = samples
        self._cache = cache
        self._lengths_B = lengths_B + 1
        self._longest = longest + 1
        self._place_B = torch.arange(len(lengths_B), device=lengths_B.device) * cache.length + lengths_B

    def attend(self, layer: int, q_BHd: Tensor, k_BKd: Tensor, v_BKd: Tensor) -> Tensor:
        """Output of attention, same shape and dtype as ``q_BHd``."""
        self._cache.write(layer, k_BKd, v_BKd, self._place_B)
        k_BLKd, v_BLKd = self._cache.rows(layer, len(q_BHd), self._longest)
        return cached_attention(q_BHd, k_BLKd, v_BLKd, self._lengths_B, q_BHd.shape[-1] ** -0.5)

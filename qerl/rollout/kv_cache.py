"""Keys and values of the running sequences, in pages: one page a row on the CPU, small pages from a common stock elsewhere.

With one page a row that holds the longest sequence, attention reads the cache in place, and rows that move take their page's
content along. With small pages a table says which pages a row has; rows share the full pages of their prompt, and nothing is
copied when they move. They are in the type of attention; either may be in FP8, which passes that compute a prompt do not see: they attend to what they have just computed.

Shape legend: P pages, L tokens a page, N pages a row has at most, K key/value heads, d head size, T tokens, B running rows,
R rows, M pages or tokens named in one call.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qerl.kernels.attention import KeySpans, packed_attention
from qerl.kernels.cached_attention import CacheRows, SharedPages, cached_attention
from qerl.kernels.cached_attention.storage import raw, write
from qerl.kernels.cuda import LentMemory
from qerl.kernels.rope import CachePlaces
from qerl.model.attention import PackedSequences, Rotary, SampleRows


class KVCache:
    """Pages [P, L, K, d] of keys and of values, one pair a layer.

    Pages are zero at first: attention multiplies what lies beyond a sequence's end by zero, which must not meet a NaN.

    Args:
        layers: decoder layers.
        pages: P.
        page_tokens: L.
        kv_heads: K.
        head_dim: d.
        dtypes: of keys and of values.
        device: where they lie.
        lent: their memory can be given back, and had again at the same addresses (a CUDA device that `kernels.cuda.can_lend`).
    """

    def __init__(
        self,
        *,
        layers: int,
        pages: int,
        page_tokens: int,
        kv_heads: int,
        head_dim: int,
        dtypes: tuple[torch.dtype, torch.dtype],
        device: torch.device,
        lent: bool = False,
    ):
        shape = (pages, page_tokens, kv_heads, head_dim)
        self.pages = pages
        self.page_tokens = page_tokens
        sizes = [math.prod(shape) * dtype.itemsize for dtype in dtypes]
        self.memory = LentMemory(layers * sum(sizes), device) if lent else None
        self.slabs = [self._pair(layer * sum(sizes), shape, dtypes, device) for layer in range(layers)]

    def _pair(
        self, start: int, shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, zero; in memory that is lent they begin at byte ``start``."""
        if self.memory is None:
            return torch.zeros(shape, dtype=dtypes[0], device=device), torch.zeros(
                shape, dtype=dtypes[1], device=device
            )
        sizes = [math.prod(shape) * dtype.itemsize for dtype in dtypes]
        keys, values = self.memory.tensor()[start : start + sum(sizes)].split(sizes)
        return keys.view(dtypes[0]).view(shape), values.view(dtypes[1]).view(shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return sum(slab.numel() * slab.element_size() for pair in self.slabs for slab in pair)

    @property
    def there(self) -> bool:
        """Whether the memory of the pages is there: not given back."""
        return self.memory is None or self.memory.there

    def give_back(self) -> bool:
        """Give the memory of all pages back, if it is lent; whether it was. Nothing may read them until `take`."""
        if self.memory is not None:
            self.memory.give_back()
        return self.memory is not None

    def take(self) -> None:
        """Have the memory of all pages again, where they were, if it was given back; they are zero then."""
        if self.memory is not None:
            self.memory.take()

    def write(self, layer: int, k_MKd: Tensor, v_MKd: Tensor, place_M: Tensor) -> None:
        """Store M tokens at places page * L + offset (int64 [M], each once)."""
        for slab_PLKd, values_MKd in zip(self.slabs[layer], (k_MKd, v_MKd), strict=True):
            write(slab_PLKd, place_M, values_MKd)

    def read(self, layer: int, place_M: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values at M places, [M, K, d] each in ``dtype``."""
        k_PLKd, v_PLKd = self.slabs[layer]
        k_MKd, v_MKd = (raw(slab).flatten(0, 1).index_select(0, place_M).view(slab.dtype) for slab in (k_PLKd, v_PLKd))
        return k_MKd.to(dtype), v_MKd.to(dtype)

    def copy(self, source_M: Tensor, target_M: Tensor, length: int) -> None:
        """Copy the first ``length`` tokens of pages to other pages (int64 [M] each, disjoint)."""
        for pair in self.slabs:
            for slab_PLKd in pair:
                raw(slab_PLKd)[target_M, :length] = raw(slab_PLKd)[source_M, :length]


class PrefillContext:
    """Attention of a packed prefill pass: each prompt over itself; keys and values also go to the cache.

    Args:
        cache: where to.
        packed: bounds and positions of the prompts.
        source_M: int64 [M], token of the pass: all of them in their order, and behind them once more for each further place a token that several
            rows store.
        place_M: int64 [M], where it goes (page * L + offset).
        earlier_L: where the pass is a part of one prompt and not its first: int64, places of all tokens up to the last of the pass.
    """

    def __init__(
        self,
        cache: KVCache,
        packed: PackedSequences,
        source_M: Tensor,
        place_M: Tensor,
        earlier_L: Tensor | None = None,
    ):
        self.positions_T = packed.positions_T
        self.samples = packed.samples
        self._cache, self._packed = cache, packed
        self._source_M, self._place_M, self._earlier_L = source_M, place_M, earlier_L
        if earlier_L is not None:
            bounds_2 = torch.arange(0, len(earlier_L) + 1, len(earlier_L), dtype=torch.int32, device=earlier_L.device)
            self._keys = KeySpans(cu_keys_S1=bounds_2, lengths=(len(earlier_L),))

    def attend(self, layer: int, qkv_TX: Tensor, rotary: Rotary) -> Tensor:
        """Output of attention, [T, H, d]."""
        k_PLKd, v_PLKd = self._cache.slabs[layer]
        if k_PLKd.dtype == v_PLKd.dtype == (rotary.dtype or qkv_TX.dtype):
            places = CachePlaces(k_PLKd=k_PLKd, v_PLKd=v_PLKd, source_M=self._source_M, place_M=self._place_M)
            q_THd, k_TKd, v_TKd = rotary.split(qkv_TX, places)
        else:
            q_THd, k_TKd, v_TKd = rotary.split(qkv_TX)
            k_MKd, v_MKd = (values.index_select(0, self._source_M) for values in (k_TKd, v_TKd))
            self._cache.write(layer, k_MKd, v_MKd, self._place_M)
        output_dtype = rotary.output_dtype or q_THd.dtype
        if self._earlier_L is None:
            return self._packed.attend_heads(q_THd, k_TKd, v_TKd).to(output_dtype)
        k_LKd, v_LKd = self._cache.read(layer, self._earlier_L, q_THd.dtype)
        bounds_2, lengths = self._packed.cu_seqlens_S1, self._packed.lengths
        scale = q_THd.shape[-1] ** -0.5
        o_THd = packed_attention(q_THd, k_LKd, v_LKd, bounds_2, scale, lengths=lengths, keys=self._keys)
        return o_THd.to(output_dtype)


class DecodeContext:
    """Attention of a decode step: one new token a row over the row's cache, the new token included.

    Args:
        cache: of all rows.
        lengths_B: int64 [B], tokens of each running row before this step, which is the position of its new token.
        samples: whose rows these are, for noise that differs between them.
        table_BN: int32 [B, N], pages of each row; None when row b has page b alone.
        longest: largest of ``lengths_B`` where the host knows it and there is no table: less of the cache is looked at then.
        shared: pages that are read once for several rows.
    """

    def __init__(
        self,
        cache: KVCache,
        lengths_B: Tensor,
        samples: SampleRows | None = None,
        *,
        table_BN: Tensor | None = None,
        longest: int | None = None,
        shared: SharedPages | None = None,
    ):
        self.positions_T = lengths_B
        self.samples = samples
        self._cache = cache
        self._rows = CacheRows(lengths_B, cache.page_tokens, table_BN=table_BN, longest=longest, shared=shared)

    def attend(self, layer: int, qkv_BX: Tensor, rotary: Rotary) -> Tensor:
        """Output of attention, [B, H, d]."""
        size = rotary.cos_Td.shape[-1]
        return cached_attention(
            qkv_BX,
            (rotary.cos_Td, rotary.sin_Td),
            rotary.heads,
            rotary.kv_heads,
            *self._cache.slabs[layer],
            self._rows,
            size**-0.5,
            norms=rotary.norms,
            bias=rotary.bias,
            dtype=rotary.dtype,
            output_dtype=rotary.output_dtype,
        )

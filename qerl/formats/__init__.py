"""Weight formats: code tables, scales, packing and rounding, behind one interface.

`get_format(name).quantize(weight)` gives a `PackedWeight`; `dequantize(packed)` gives the dense matrix back.
"""

from qerl.formats.base import BlockScales, PackedWeight, WeightFormat
from qerl.formats.registry import FORMAT_NAMES, dequantize, get_format

__all__ = ["FORMAT_NAMES", "BlockScales", "PackedWeight", "WeightFormat", "dequantize", "get_format"]

"""Relative RMS error of every format and method on normal weights, and what making them costs.

    python benchmarks/formats_gaussian.py [--size 2048] [--json]

The error does not depend on the standard deviation of the weights (formats scale), so one figure a cell says it all:
|w_hat - w| / |w| over a SIZE x SIZE matrix. Time is of one quantization on the device, threads as set by OMP_NUM_THREADS.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from qerl.formats import FORMAT_NAMES, dequantize, get_format


def measure(name: str, method: str, weight: torch.Tensor) -> dict[str, float | str]:
    """One cell of the table."""
    fmt = get_format(name)
    start = time.perf_counter()
    packed = fmt.quantize(weight, method=method)
    if weight.is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    error = torch.linalg.vector_norm(dequantize(packed) - weight, dtype=torch.float64)
    return {
        "format": name,
        "method": method,
        "relative_rms": float(error / torch.linalg.vector_norm(weight, dtype=torch.float64)),
        "bits": 8 * packed.nbytes() / weight.numel(),
        "ns_per_weight": 1e9 * seconds / weight.numel(),
    }


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    weight = torch.randn(options.size, options.size, generator=torch.Generator().manual_seed(0)).to(options.device)
    names = [name for name in FORMAT_NAMES if name != "bf16"]
    rows = []
    for name in names:
        for method in get_format(name).methods:
            measure(name, method, weight[:64])  # warm up
            rows.append(measure(name, method, weight))
    if options.json:
        print(json.dumps({"torch": torch.__version__, "device": options.device, "size": options.size, "rows": rows}))
        return
    print(f"{'format':8} {'method':14} {'relative RMS':>12} {'bits':>7} {'ns/weight':>10}")
    for row in rows:
        print(
            f"{row['format']:8} {row['method']:14} {row['relative_rms']:12.4f} {row['bits']:7.3f} {row['ns_per_weight']:10.1f}"
        )


if __name__ == "__main__":
    main()

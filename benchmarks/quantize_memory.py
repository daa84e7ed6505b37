"""Peak memory of quantizing, against the depth of the model: random weights in real shapes, a few layers of them.

    python benchmarks/quantize_memory.py --shape 32b --layers 1 3 --method rtn
    python benchmarks/quantize_memory.py --shape 0.5b --layers 2 4 --method awq --calibration-count 8 --calibration-length 256

Each depth is a process of its own on the CPU. Peak is the largest resident set (VmHWM), files that are mapped included; base is that of
the process after its imports. A shard of the source holds about --shard-gb; a layer is never cut.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.stored import write_result
from qerl.units import GB

SHAPES: dict[str, dict[str, int]] = {
    "32b": {"hidden_size": 5120, "intermediate_size": 27648, "num_attention_heads": 40, "num_key_value_heads": 8},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2},
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2},
}
"""Shapes of the Qwen2.5 family; the vocabulary is that of the packaged model, whose tokenizer is used."""


def write_model(folder: Path, shape: str, layers: int, shard_bytes: float) -> int:
    """A checkpoint of random bfloat16 weights; returns its largest shard in bytes."""
    import torch
    from safetensors.torch import save_file

    from qerl.model.checkpoint import resolve_model_path

    demo = resolve_model_path("demo")
    config = json.loads((demo / "config.json").read_text())
    size = SHAPES[shape]
    config |= {**size, "num_hidden_layers": layers, "max_position_embeddings": 4096}
    config.pop("layer_types", None)
    folder.mkdir(parents=True)
    for path in demo.glob("token*"):
        shutil.copy(path, folder / path.name)
    (folder / "config.json").write_text(json.dumps(config))
    hidden, inner = size["hidden_size"], size["intermediate_size"]
    kv = hidden // size["num_attention_heads"] * size["num_key_value_heads"]
    generator = torch.Generator().manual_seed(0)
    # One pool of random numbers for all tensors: drawing a 32B layer takes longer than quantizing it.
    pool = (0.02 * torch.randn(hidden * inner, generator=generator)).bfloat16()
    linear = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }

    def tensors(layer: int) -> dict[str, torch.Tensor]:
        prefix = f"model.layers.{layer}"
        made = {f"{prefix}.{name}.weight": pool[: o * i].view(o, i).clone() for name, (o, i) in linear.items()}
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = linear[f"self_attn.{name}"][0]
            made[f"{prefix}.self_attn.{name}.bias"] = pool[:rows].clone()
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[f"{prefix}.{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        return made

    pending = {
        "model.embed_tokens.weight": pool[: config["vocab_size"] * hidden].view(-1, hidden).clone(),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    weight_map, shards, largest = {}, 0, 0
    for layer in range(layers):
        pending |= tensors(layer)
        stored = sum(tensor.numel() * 2 for tensor in pending.values())
        if stored >= shard_bytes or layer == layers - 1:
            name = f"model-{shards:05d}.safetensors"
            save_file(pending, folder / name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(pending, name)
            pending, shards, largest = {}, shards + 1, max(largest, stored)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return largest


def quantize(folder: Path, out: Path, args: argparse.Namespace, answers: Any) -> None:
    """Runs in a process of its own; sends what it measured."""
    import torch

    from qerl.quantize import TextRequest, quantize_checkpoint

    base = resident("VmRSS")
    text = TextRequest(name="arithmetic", count=args.calibration_count, length=args.calibration_length)
    started = time.perf_counter()
    quality = quantize_checkpoint(
        folder,
        out,
        method=args.method,
        calibration=text,
        activations=args.activations,
        dtype=getattr(torch, args.dtype),
        shard_bytes=int(args.shard_gb * GB),
    )
    seconds = time.perf_counter() - started
    answers.put({"base": base, "peak": resident("VmHWM"), "seconds": seconds, "bytes": quality["total"]["bytes"]})


def resident(field: str) -> int:
    """Bytes of one field of this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure(args: argparse.Namespace, layers: int) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    context = multiprocessing.get_context("spawn")
    try:
        with context.Pool(1) as pool:
            shard = pool.apply(write_model, (folder / "model", args.shape, layers, args.shard_gb * GB))
        answers = context.SimpleQueue()
        process = context.Process(target=quantize, args=(folder / "model", folder / "out", args, answers))
        process.start()
        process.join()
        assert process.exitcode == 0, f"the quantizing process ended with {process.exitcode}"
        found = answers.get()
    finally:
        shutil.rmtree(folder)
    itemsize = 2 if args.dtype == "bfloat16" else 4
    hidden = SHAPES[args.shape]["hidden_size"]
    activations = 0
    if args.method in ("awq", "gptq", "best") and args.activations == "memory":
        activations = args.calibration_count * args.calibration_length * hidden * itemsize
    return {"layers": layers, **found, "shard": shard, "activations": activations}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="32b")
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--method", default="rtn")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--activations", choices=("memory", "disk"), default="memory")
    parser.add_argument("--calibration-count", type=int, default=16)
    parser.add_argument("--calibration-length", type=int, default=256)
    parser.add_argument("--shard-gb", type=float, default=1.0)
    parser.add_argument(
        "--folder", help="where checkpoints are made and removed; the system's temporary folder if not given"
    )
    parser.add_argument("--out", type=Path, default=Path("results/quantize"))
    args = parser.parse_args()
    rows = []
    print("layers     base     peak  peak-base  largest shard  activations  seconds")
    for layers in args.layers:
        row = measure(args, layers)
        rows.append(row)
        above = row["peak"] - row["base"]
        print(
            f"{layers:6}  {row['base'] / GB:7.2f}  {row['peak'] / GB:7.2f}  {above / GB:9.2f}  {row['shard'] / GB:13.2f}"
            f"  {row['activations'] / GB:11.3f}  {row['seconds']:7.1f}",
            flush=True,
        )
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / f"memory-{args.shape}-{args.method}.json"
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    write_result(file, settings=settings, rows=rows)
    print(file)


if __name__ == "__main__":
    main()

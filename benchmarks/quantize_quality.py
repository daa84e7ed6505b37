"""What formats and methods cost a model: KL to the plain model, perplexity and entropy, for each pair of them.

    python benchmarks/quantize_quality.py MODEL --data own=answers.parquet gold=gsm8k:test --calibration calib.jsonl

`--data LABEL=SOURCE` names a text by its label in the results. All of it runs layer by layer, without writing checkpoints (NF4 has no checkpoint layout): for each pair, calibration text and the texts
to compare on pass through the layers as these are quantized; the plain model's states are computed once. Results go to
results/quantize/MODEL-DTYPE.json after every pair, so an interrupted run keeps what it has, and --resume adds what is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from benchmarks.stored import write_result
from qerl.formats import get_format
from qerl.model.checkpoint import resolve_model_path
from qerl.model.tokenizer import Tokenizer, load_tokenizer
from qerl.quantize.comparison import compare
from qerl.quantize.pipeline import Pipeline, Request
from qerl.quantize.quality import TensorQuality, summary
from qerl.quantize.recipes import RECIPES
from qerl.quantize.source import CheckpointSource
from qerl.quantize.texts import Text, calibration_text, report_text, split_fields

SHOWN = ("kl", "top1_agreement", "perplexity", "entropy_change")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="model folder, or NAME under $QERL_MODELS")
    parser.add_argument(
        "--data",
        nargs="+",
        required=True,
        metavar="[LABEL=]SOURCE",
        help="texts to compare on: JSONL, NAME:SPLIT, or a rollout's parquet",
    )
    parser.add_argument("--count", type=int, default=64, help="rows of each")
    parser.add_argument("--length", type=int, default=2048, help="at most this many tokens of a row")
    parser.add_argument("--calibration", help="data set; without one, only methods that need none run")
    parser.add_argument("--calibration-count", type=int, default=256)
    parser.add_argument("--calibration-length", type=int, default=2048)
    parser.add_argument("--text-fields", default="question,solution")
    parser.add_argument("--formats", default="nvfp4,mxfp4,nf4")
    parser.add_argument("--methods", default="rtn,mse,awq,gptq,best")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--out", type=Path, default=Path("results/quantize"))
    parser.add_argument("--resume", action="store_true", help="keep results that are there")
    return parser.parse_args()


def texts(args: argparse.Namespace, tokenizer: Tokenizer) -> tuple[Text | None, dict[str, Text]]:
    fields = split_fields(args.text_fields)
    calibration = None
    if args.calibration:
        calibration = calibration_text(
            args.calibration, tokenizer, count=args.calibration_count, length=args.calibration_length, fields=fields
        )
    compared = {
        label: report_text(source, tokenizer, count=args.count, length=args.length, fields=fields)
        for label, source in map(labeled, args.data)
    }
    return calibration, compared


def without_sequences(figures: dict[str, Any]) -> dict[str, Any]:
    """The means and counts alone: files of results stay small."""
    return {key: value for key, value in figures.items() if key != "entropy_change_per_sequence"}


def labeled(argument: str) -> tuple[str, str]:
    """(label, source) of one `--data` argument; the source is its own label when there is none."""
    label, separator, source = argument.partition("=")
    return (label, source) if separator else (argument, argument)


def public(text: Text | None) -> dict[str, Any] | None:
    """A text's record without the place on this machine."""
    if text is None:
        return None
    return {key: value for key, value in text.record.items() if key != "location"} | {
        "source": Path(str(text.record["source"])).name
    }


class Bench:
    """One model and its texts."""

    def __init__(self, args: argparse.Namespace):
        self.device = torch.device(args.device)
        self.dtype = getattr(torch, args.dtype)
        self.source = CheckpointSource(resolve_model_path(args.model))
        self.calibration, self.compared = texts(args, load_tokenizer(self.source.folder))
        everything = [self.calibration, *self.compared.values()]
        self.longest = max(len(s.ids) for text in everything if text is not None for s in text.sequences)
        plain = self.pipeline("bf16", "rtn")
        self.head = plain.head()
        self.plain = {name: plain.stream(text.sequences) for name, text in self.compared.items()}
        plain.plain_layers(list(self.plain.values()))

    def pipeline(self, weight_format: str, method: str) -> Pipeline:
        request = Request(format=weight_format, method=method, device=self.device, dtype=self.dtype)
        return Pipeline(self.source, request, longest=self.longest)

    def run(self, weight_format: str, method: str) -> dict[str, Any]:
        pipeline = self.pipeline(weight_format, method)
        streams = {name: pipeline.stream(text.sequences) for name, text in self.compared.items()}
        calibration = None
        started = time.perf_counter()
        if pipeline.recipe.calibrated:
            assert self.calibration is not None
            calibration = pipeline.stream(self.calibration.sequences)
        tensors: dict[str, TensorQuality] = {}
        for layer in pipeline.layers(calibration, quantized=list(streams.values())):
            tensors |= layer.quality
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        return {
            "format": weight_format,
            "method": method,
            "seconds": seconds,
            "weights": summary(tensors),
            "models": {
                name: without_sequences(compare(self.plain[name], stream, self.compared[name].sequences, self.head))
                for name, stream in streams.items()
            },
        }


def table(results: list[dict[str, Any]], data: list[str]) -> str:
    lines = []
    for name in data:
        lines += [
            f"\n{name}",
            "format method         " + " ".join(f"{key:>15}" for key in SHOWN) + "   H up  weight error  seconds",
        ]
        for result in results:
            model = result["models"][name]
            lines.append(
                f"{result['format']:6} {result['method']:14} "
                + " ".join(f"{model[key]:15.4f}" for key in SHOWN)
                + f"  {model['entropy_rises']:3}/{model['sequences']:<3}  {result['weights']['relative_error']:10.4f}  {result['seconds']:7.1f}"
            )
    return "\n".join(lines)


def main() -> None:
    args = parse()
    started = time.perf_counter()
    bench = Bench(args)
    print(f"texts and plain model: {time.perf_counter() - started:.1f} s", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / f"{bench.source.folder.name}-{args.dtype}.json"
    results = json.loads(file.read_text())["results"] if args.resume and file.exists() else []
    done = {(result["format"], result["method"]) for result in results}
    for weight_format in args.formats.split(","):
        for method in args.methods.split(","):
            usable = RECIPES[method].scales in get_format(weight_format).methods
            if (weight_format, method) in done or not usable:
                continue
            if RECIPES[method].calibrated and bench.calibration is None:
                continue
            results.append(bench.run(weight_format, method))
            content = {
                "model": bench.source.folder.name,
                "dtype": args.dtype,
                "calibration": public(bench.calibration),
                "compared_on": {name: public(text) for name, text in bench.compared.items()},
                "results": results,
            }
            write_result(file, **content)
            print(table(results[-1:], list(bench.compared)), flush=True)
    print(table(results, list(bench.compared)))
    print(f"\n{file}")


if __name__ == "__main__":
    main()

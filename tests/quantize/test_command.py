"""`qerl quantize`: options become a request, and what was measured is said in words."""

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from qerl.cli import app
from qerl.config.load import load_config
from qerl.errors import ConfigError
from qerl.quantize.command import quantize_command
from qerl.quantize.report import facts, table
from qerl.units import bytes_text


def run(*arguments):
    return CliRunner().invoke(app, ["quantize", *map(str, arguments)])


def test_facts_and_table_of_a_calibrated_checkpoint(tmp_path):
    options = ("--method", "awq", "--calibration", "arithmetic", "--calibration-count", 4, "--calibration-length", 48)
    result = run("demo", "--out", tmp_path / "out", *options, "--report-data", "arithmetic:test", "--report-count", 8)
    assert result.exit_code == 0, result.output
    for text in (
        "nvfp4, awq, ct rounding",
        "4 x 48 tokens of arithmetic:train",
        "nats a token",
        "agree with the plain model",
    ):
        assert text in result.output, text
    assert "higher on" in result.output and "of 8 texts" in result.output
    assert "0.5626 bytes a weight" in result.output and "of the linear layers, in 14 tensors" in result.output
    written = bytes_text((tmp_path / "out" / "model.safetensors").stat().st_size)
    assert f"{written} of safetensors" in result.output
    for projection in ("q_proj", "o_proj", "down_proj"):
        assert projection in result.output


def test_a_method_without_its_text_is_refused_before_anything_is_written(tmp_path):
    result = run("demo", "--out", tmp_path / "out", "--method", "best")
    assert result.exit_code == 2
    assert "--calibration" in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        (["quant.overrides={layers.0.*: bf16}"], {}, r"quant\.overrides is about quantizing at load"),
        (["quant.lm_head=fp8"], {}, r"quant\.lm_head is about quantizing at load"),
        ([], {"activations": "tape"}, "--activations is unknown; got tape; expected memory or disk"),
        ([], {"text_fields": ","}, "no text field is named"),
        (["quant.format=nf4"], {}, "format=nf4.*quantized at load"),
        ([], {"method": "rtm"}, "method=rtm.*Did you mean rtn"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path, settings, options, message):
    from qerl.model.checkpoint import resolve_model_path

    defaults = {
        "method": None,
        "calibration": None,
        "calibration_count": 4,
        "calibration_length": 48,
        "report_data": None,
        "report_count": 4,
        "report_length": 64,
        "text_fields": "question,solution",
        "activations": "memory",
        "progress": lambda *call: None,
    }
    config = load_config(None, settings)
    with pytest.raises(ConfigError, match=message):
        quantize_command(
            resolve_model_path("demo"), tmp_path / "out", config, device=torch.device("cpu"), **{**defaults, **options}
        )
    assert list(tmp_path.iterdir()) == []


def quality(**changes):
    tensors = {
        f"model.layers.{layer}.mlp.down_proj.weight": {
            "relative_error": error,
            "sqnr_db": 20.0,
            "bytes": 9,
            "shape": [2, 16],
        }
        for layer, error in enumerate((0.06, 0.08))
    }
    total = {"relative_error": 0.07, "worst": "model.layers.1.mlp.down_proj.weight", "tensors": 2, "bytes": 18}
    total |= {"dense_bytes": 64, "bytes_per_weight": 0.5625, "over_ideal": 1.0}
    return {
        "format": "nvfp4",
        "method": "rtn",
        "rounding": "ct",
        "calibration": None,
        "model": None,
        "total": total,
        "tensors": tensors,
        **changes,
    }


def test_the_table_sums_up_a_projection_over_layers():
    console = Console(width=100)
    with console.capture() as capture:
        console.print(table(quality()))
    row = next(line for line in capture.get().splitlines() if "down_proj" in line)
    assert [cell.strip() for cell in row.strip("│ ").split("│")] == ["down_proj", "2", "7.07%", "23.0 dB", "8.00%", "1"]


def test_facts_without_comparison_or_calibration_leave_them_out():
    assert facts(quality()).keys() == {"format", "error", "size"}


def test_exact_weights_and_a_single_text_have_no_decibels_and_no_standard_error():
    exact = quality()
    for tensor in exact["tensors"].values():
        tensor["relative_error"] = 0.0
    console = Console(width=100)
    with console.capture() as capture:
        console.print(table(exact))
    assert "exact" in capture.get()
    model = {
        "kl": 0.02,
        "kl_standard_error": None,
        "tokens": 10,
        "top1_agreement": 0.9,
        "plain_perplexity": 2.0,
        "perplexity": 2.1,
        "plain_entropy": 0.0,
        "entropy": 0.1,
        "entropy_change": None,
        "entropy_rises": 1,
        "entropy_falls": 0,
        "sequences": 1,
    }
    shown = facts(quality(model=model))
    assert shown["KL"] == "0.0200 nats a token, over 10 tokens"
    assert shown["entropy"] == "0.0000 -> 0.1000 nats; higher on 1, lower on 0 of 1 texts"

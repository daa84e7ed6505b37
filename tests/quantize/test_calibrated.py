"""Calibrated quantizers on the packaged model: what they leave, what they record, and what servers and trainers read."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import decoder_logits, write_tiny

from qerl.config.schema import QuantConfig
from qerl.formats import dequantize
from qerl.kernels.rms_norm import rms_norm
from qerl.model.attention import PackedSequences
from qerl.model.checkpoint import load_model, resolve_model_path
from qerl.model.tokenizer import load_tokenizer
from qerl.quantize import TextRequest, quantize_checkpoint
from qerl.quantize.layer_tensors import LayerForward, read_layer
from qerl.quantize.pipeline import Pipeline, Request
from qerl.quantize.source import CheckpointSource
from qerl.quantize.texts import calibration_text, report_text

DEMO = resolve_model_path("demo")
CALIBRATION = TextRequest(name="arithmetic", count=16, length=64)
REPORT = TextRequest(name="arithmetic", count=12, length=64)
CALIBRATED = ("awq", "gptq", "best")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """method -> (folder, what quality.json holds)."""
    root = tmp_path_factory.mktemp("written")
    return {
        method: (
            root / method,
            quantize_checkpoint(DEMO, root / method, method=method, calibration=CALIBRATION, report=REPORT),
        )
        for method in ("rtn", *CALIBRATED)
    }


def sequences():
    text = report_text("arithmetic", load_tokenizer(DEMO), count=REPORT.count, length=REPORT.length)
    return text, [torch.tensor(sequence.ids) for sequence in text.sequences]


def load(folder, weight_format):
    return load_model(folder, quant=QuantConfig(format=weight_format), lora=None, dtype=torch.float32)


@pytest.mark.parametrize("variant", ["qwen2-tied", "llama-all-biases-wide-heads", "qwen3-wide-heads"])
def test_layers_run_as_in_the_decoder(variant, tmp_path):
    write_tiny(tmp_path / "plain", variant)
    model = load(tmp_path / "plain", "bf16")
    source = CheckpointSource(tmp_path / "plain")
    forward = LayerForward(source.spec, 16, torch.device("cpu"))
    context = PackedSequences(torch.tensor([0, 9, 14]))
    tokens = torch.arange(14) % 90
    x_TD = model.embed_tokens[tokens]
    for index in range(source.spec.num_layers):
        x_TD = forward.whole(
            x_TD, read_layer(source.spec, source, index, torch.device("cpu")).cast(torch.float32), context
        )
    with torch.no_grad():
        expected = model(tokens, context)
    assert torch.equal(rms_norm(x_TD, model.final_norm, source.spec.rms_eps), expected)


@pytest.mark.parametrize("method", ["rtn", *CALIBRATED])
def test_the_comparison_equals_one_of_whole_models(written, method):
    """Streams of hidden states against two loaded models, figures computed the long way."""
    text, tokens = sequences()
    plain, quantized = load(DEMO, "bf16"), load(written[method][0], "nvfp4")
    p, q = (decoder_logits(model, tokens).double().log_softmax(-1) for model in (plain, quantized))
    lengths = [len(part) for part in tokens]
    keep = torch.cat([torch.arange(length) < length - 1 for length in lengths])
    targets = torch.cat([part[1:] for part in tokens])
    p, q = p[keep], q[keep]
    ours = written[method][1]["model"]
    assert ours["tokens"] == sum(lengths) - len(lengths)
    assert ours["kl"] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
    assert ours["top1_agreement"] == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()), abs=2e-3)
    for log_probs, name in ((p, "plain_"), (q, "")):
        nll = -log_probs.gather(1, targets[:, None]).mean()
        assert ours[f"{name}perplexity"] == pytest.approx(math.exp(float(nll)), rel=1e-4)
        assert ours[f"{name}entropy"] == pytest.approx(float(-(log_probs.exp() * log_probs).sum(-1).mean()), rel=1e-4)
    change = -(q.exp() * q).sum(-1) + (p.exp() * p).sum(-1)
    rises = [float(part.mean()) > 0 for part in change.split([length - 1 for length in lengths])]
    assert ours["entropy_rises"] == sum(rises)
    assert len(text.sequences) == ours["sequences"] == 12


def test_calibration_pays(written):
    kl = {method: quality["model"]["kl"] for method, (_, quality) in written.items()}
    assert kl["awq"] < 0.9 * kl["rtn"]
    assert kl["gptq"] < 0.5 * kl["rtn"]
    assert kl["best"] < 0.5 * kl["rtn"]


@pytest.mark.parametrize("method", ["awq", "best"])
def test_scaling_never_loses_in_its_own_loss_and_what_was_chosen_is_recorded(written, method):
    record = json.loads((written[method][0] / "qerl_quantization.json").read_text())
    assert len(record["layers"]) == 2
    for layer in record["layers"]:
        assert layer.keys() == {"qkv", "o", "gate_up", "down"}
        for search in layer.values():
            assert search["scaled_output_error"] <= search["unscaled_output_error"]
            assert 0 <= search["exponent"] < 1
            assert 0 < search["output_error"] < 0.1
            assert 0 < search["clipped"] < 1
    assert (
        record["calibration"].items() >= {"source": "arithmetic", "split": "train", "count": 16, "length": 64}.items()
    )
    assert "no chat template" in record["calibration"]["preprocessing"]
    assert record["steps"]["fold"] and record["folded_scales"] == "qerl_folds.st"
    folds = load_file(written[method][0] / "qerl_folds.st")
    spec = CheckpointSource(DEMO).spec
    assert {name: tensor.numel() for name, tensor in folds.items() if name.startswith("layers.1.")} == {
        "layers.1.attn_norm": spec.hidden_size,
        "layers.1.v": spec.kv_size,
        "layers.1.o": spec.q_size,
        "layers.1.mlp_norm": spec.hidden_size,
        "layers.1.up": spec.intermediate_size,
    }


def test_folded_norms_and_biases_are_written_and_undo_the_scales(written):
    folder, before = written["awq"][0], load_file(DEMO / "model.safetensors")
    after, folds = load_file(folder / "model.safetensors"), load_file(folder / "qerl_folds.st")
    for layer in range(2):
        for norm, place in (("input_layernorm", "attn_norm"), ("post_attention_layernorm", "mlp_norm")):
            name = f"model.layers.{layer}.{norm}.weight"
            assert after[name].dtype == before[name].dtype
            product = after[name].double() * folds[f"layers.{layer}.{place}"]
            torch.testing.assert_close(product, before[name].double(), rtol=1e-15, atol=0)
        bias = f"model.layers.{layer}.self_attn.v_proj.bias"
        assert after[bias].dtype == before[bias].dtype
        torch.testing.assert_close(
            after[bias].double() * folds[f"layers.{layer}.v"], before[bias].double(), rtol=1e-15, atol=0
        )
        weight = f"model.layers.{layer}.mlp.up_proj"
        scaled = (
            before[f"{weight}.weight"].double()
            * folds[f"layers.{layer}.mlp_norm"]
            / folds[f"layers.{layer}.up"][:, None]
        )
        stored = load(folder, "nvfp4").layers[layer].gate_up
        start, stop = stored.rows_of("up_proj")
        error = (dequantize(stored.weight)[start:stop] - scaled).norm() / scaled.norm()
        assert 0.05 < error < 0.2


@pytest.mark.parametrize("method", CALIBRATED)
def test_transformers_reads_it_with_equal_weights(written, method):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        written[method][0], dtype=torch.bfloat16, local_files_only=True
    )
    ours = load(written[method][0], "nvfp4")
    theirs(torch.arange(1, 6)[None])  # unpacks
    for linear in ours.grouped_linears():
        dense = dequantize(linear.weight)
        for part in linear.parts:
            start, stop = linear.rows_of(part)
            name = "model." + linear.name.rsplit(".", 1)[0] + f".{part}.weight"
            torch.testing.assert_close(theirs.get_parameter(name).float(), dense[start:stop], rtol=2**-7, atol=0)
    for layer in range(2):
        norm = theirs.get_parameter(f"model.layers.{layer}.input_layernorm.weight")
        assert torch.equal(norm.float(), ours.norm_weight(layer, "attn_norm"))


def test_error_feedback_trades_weight_error_for_output_error(written):
    total = {method: quality["total"]["relative_error"] for method, (_, quality) in written.items()}
    assert total["gptq"] > total["rtn"]
    record = json.loads((written["gptq"][0] / "qerl_quantization.json").read_text())
    assert record["folded_scales"] is None
    assert not (written["gptq"][0] / "qerl_folds.st").exists()
    assert all(search["damping"] == 0.01 for layer in record["layers"] for search in layer.values())


def test_hidden_states_on_disk_give_the_same_bytes(written, tmp_path):
    out = tmp_path / "out"
    quantize_checkpoint(DEMO, out, method="best", calibration=CALIBRATION, report=REPORT, activations="disk")
    for name in ("model.safetensors", "qerl_folds.st", "quality.json"):
        assert (out / name).read_bytes() == (written["best"][0] / name).read_bytes(), name
    assert {path.name for path in out.iterdir()} == {path.name for path in written["best"][0].iterdir()}


@pytest.mark.parametrize("weight_format", ["mxfp4", "nf4", "nf4_dq"])
def test_other_formats_gain_too(weight_format):
    """Without writing: NF4 has no layout."""
    source, tokenizer = CheckpointSource(DEMO), load_tokenizer(DEMO)
    text = calibration_text("arithmetic", tokenizer, count=16, length=64)
    errors = {}
    for method in ("rtn", "best"):
        pipeline = Pipeline(source, Request(format=weight_format, method=method), longest=64)
        rider, plain = (pipeline.stream(text.sequences) for _ in range(2))
        calibration = pipeline.stream(text.sequences) if pipeline.recipe.calibrated else None
        for _ in pipeline.layers(calibration, quantized=[rider], plain=[plain]):
            pass
        difference = sum(float((a - b).square().sum()) for (a, _), (b, _) in zip(rider, plain, strict=True))
        errors[method] = difference
        if calibration is not None:
            assert all(torch.equal(a, b) for (a, _), (b, _) in zip(rider, calibration, strict=True))
    assert errors["best"] < 0.5 * errors["rtn"]


def test_an_mxfp4_checkpoint_is_read_with_equal_weights(tmp_path):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    import transformers

    out = tmp_path / "out"
    quantize_checkpoint(DEMO, out, format="mxfp4", method="gptq", calibration=CALIBRATION)
    ours = load(out, "mxfp4")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16, local_files_only=True)
    theirs(torch.arange(1, 6)[None])  # unpacks
    for linear in ours.grouped_linears():
        for part in linear.parts:
            start, stop = linear.rows_of(part)
            name = "model." + linear.name.rsplit(".", 1)[0] + f".{part}.weight"
            dense = dequantize(linear.weight)[start:stop]
            assert torch.equal(theirs.get_parameter(name).float(), dense), (
                "a power of two times a code is exact in bfloat16"
            )

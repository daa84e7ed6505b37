"""The streaming quantizer: what it writes is what compressed-tensors and transformers read, and nothing half-written stays."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny

from qerl.config.schema import QuantConfig
from qerl.errors import CheckpointError, ConfigError, FormatError
from qerl.formats import dequantize, get_format
from qerl.model.checkpoint import load_model
from qerl.quantize import quantize_checkpoint

GROUPS = {
    "self_attn": [("q_proj", "k_proj", "v_proj"), ("o_proj",)],
    "mlp": [("gate_proj", "up_proj"), ("down_proj",)],
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A tiny random Qwen2 in bfloat16, unsharded, with a few tokenizer files."""
    folder = tmp_path_factory.mktemp("plain")
    write_tiny(folder, "qwen2-untied-theta", dtype=torch.bfloat16)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "pytorch_model.bin").write_bytes(b"old weights")
    return folder


@pytest.fixture(scope="module")
def quantized(plain, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "tiny-nvfp4"
    return out, quantize_checkpoint(plain, out)


def stored(folder):
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def expected_weights(plain):
    """Every linear layer quantized and dequantized by `qerl.formats`, with one scale a group."""
    tensors = load_file(plain / "model.safetensors")
    weights = {}
    for layer in range(3):
        for block, groups in GROUPS.items():
            for group in groups:
                names = [f"model.layers.{layer}.{block}.{part}.weight" for part in group]
                rows = [tensors[name].shape[0] for name in names]
                packed = get_format("nvfp4").quantize(torch.cat([tensors[n] for n in names]), segments=rows)
                weights |= zip(names, dequantize(packed).split(rows), strict=True)
    return weights


def test_linear_layers_are_packed_and_all_else_is_untouched(plain, quantized):
    before, after = load_file(plain / "model.safetensors"), stored(quantized[0])
    linear = set(expected_weights(plain))
    assert len(linear) == 21
    for name, tensor in before.items():
        if name in linear:
            assert name not in after
            rows, columns = tensor.shape
            kinds = {
                f"{name}_packed": (torch.uint8, (rows, columns // 2)),
                f"{name}_scale": (torch.float8_e4m3fn, (rows, columns // 16)),
                f"{name}_global_scale": (torch.float32, (1,)),
            }
            assert {key: (after[key].dtype, tuple(after[key].shape)) for key in kinds} == kinds
        else:
            assert torch.equal(after[name], tensor), name
    assert len(after) == len(before) + 2 * len(linear)


def test_fused_groups_share_one_global_scale(plain, quantized):
    before, after = load_file(plain / "model.safetensors"), stored(quantized[0])
    for layer in range(3):
        for block, groups in GROUPS.items():
            for group in groups:
                names = [f"model.layers.{layer}.{block}.{part}.weight" for part in group]
                scales = {float(after[f"{name}_global_scale"]) for name in names}
                largest = max(before[name].float().abs().max() for name in names)
                assert scales == {float(2688 / largest)}


def test_compressed_tensors_decompresses_it_to_the_same_weights(plain, quantized):
    """Its own code, its own reading of config.json; float32 throughout."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.lifecycle.forward import dequantize as their_dequantize

    config = QuantizationConfig.model_validate(
        json.loads((quantized[0] / "config.json").read_text())["quantization_config"]
    )
    assert config.format == "nvfp4-pack-quantized"
    (scheme,) = config.config_groups.values()
    assert scheme.input_activations is None
    after = stored(quantized[0])
    for name, weight in expected_weights(plain).items():
        packed = after[f"{name}_packed"]
        theirs = their_dequantize(
            unpack_fp4_from_uint8(packed, packed.shape[0], 2 * packed.shape[1], dtype=torch.float32),
            after[f"{name}_scale"].float(),
            args=scheme.weights,
            global_scale=after[f"{name}_global_scale"],
        )
        assert torch.equal(theirs, weight), name


def test_transformers_loads_it_with_equal_weights_and_logits(plain, quantized):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        quantized[0], dtype=torch.bfloat16, local_files_only=True
    )
    reference = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, local_files_only=True)
    tokens = torch.arange(1, 12)[None]
    with torch.no_grad():
        unquantized = reference(tokens).logits
        for name, weight in expected_weights(plain).items():
            reference.get_parameter(name).copy_(weight)
        logits, expected = theirs(tokens).logits.float(), reference(tokens).logits
    # bfloat16 against float32, far below what quantization itself changes.
    assert (logits - expected).abs().max() < 0.1
    assert (unquantized - expected).abs().max() > 1.0
    # The first call has unpacked the weights, in bfloat16.
    for name, weight in expected_weights(plain).items():
        torch.testing.assert_close(theirs.get_parameter(name).float(), weight, rtol=2**-7, atol=0)


def test_reading_it_back_equals_quantizing_at_load(plain, quantized):
    quant = QuantConfig(format="nvfp4")
    options = {"quant": quant, "lora": None, "dtype": torch.float32}
    ours, direct = load_model(quantized[0], **options), load_model(plain, **options)
    for a, b in zip(ours.grouped_linears(), direct.grouped_linears(), strict=True):
        assert a.weight.segments == b.weight.segments
        for key, tensor in a.weight.tensors.items():
            assert torch.equal(tensor.view(torch.uint8), b.weight.tensors[key].view(torch.uint8)), (a.name, key)


def test_other_files_are_copied_and_other_weights_are_not(plain, quantized):
    names = {path.name for path in quantized[0].iterdir()}
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json", "quality.json"} <= names
    assert "pytorch_model.bin" not in names
    before = json.loads((plain / "config.json").read_text())
    after = json.loads((quantized[0] / "config.json").read_text())
    assert after.pop("quantization_config")["ignore"] == ["lm_head"]
    assert after == before


def test_quality_names_every_tensor_and_adds_up(plain, quantized):
    out, quality = quantized
    assert json.loads((out / "quality.json").read_text()) == quality
    before, weights = load_file(plain / "model.safetensors"), expected_weights(plain)
    assert quality["tensors"].keys() == weights.keys()
    error = norm = 0.0
    for name, weight in weights.items():
        difference = (weight.double() - before[name].double()).norm()
        relative = float(difference / before[name].double().norm())
        figures = quality["tensors"][name]
        assert figures["relative_error"] == pytest.approx(relative, rel=1e-5)
        assert figures["sqnr_db"] == pytest.approx(-20 * torch.tensor(relative).log10().item(), rel=1e-5)
        assert 0.05 < relative < 0.15, "normal weights lose about 9.5 % to NVFP4"
        error, norm = error + float(difference) ** 2, norm + float(before[name].double().norm()) ** 2
    total = quality["total"]
    assert total["tensors"] == 21
    assert total["relative_error"] == pytest.approx((error / norm) ** 0.5, rel=1e-5)
    assert quality["tensors"][total["worst"]]["relative_error"] == max(
        figures["relative_error"] for figures in quality["tensors"].values()
    )
    assert total["bytes"] / total["dense_bytes"] == pytest.approx(9 / 32, rel=1e-2)


def test_shards_in_and_out_give_the_same_tensors(plain, quantized, tmp_path):
    """The members of a fused group lie in different shards of the source."""
    source = tmp_path / "sharded"
    write_tiny(source, "qwen2-untied-theta", dtype=torch.bfloat16, shard_size="20KB")
    assert len(list(source.glob("*.safetensors"))) > 3
    quantize_checkpoint(source, tmp_path / "out", shard_bytes=20_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert len(files) > 3
    one, many = stored(quantized[0]), stored(tmp_path / "out")
    assert one.keys() == many.keys() == index["weight_map"].keys()
    for name, tensor in one.items():
        assert torch.equal(tensor.view(torch.uint8), many[name].view(torch.uint8))
        with safe_open(tmp_path / "out" / index["weight_map"][name], "pt") as file:
            assert name in file.keys()  # noqa: SIM118 (no mapping)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in one.values())
    load_model(tmp_path / "out", quant=QuantConfig(), lora=None, dtype=torch.float32)


def test_progress_is_reported_once_a_group(plain, tmp_path):
    calls = []
    quantize_checkpoint(plain, tmp_path / "out", progress=lambda *call: calls.append(call))
    assert [call[:2] for call in calls] == [(i, 12) for i in range(1, 13)]
    assert calls[0][2] == "layers.0.self_attn.qkv_proj"


def test_the_rounding_is_used_and_recorded(plain, tmp_path):
    quality = quantize_checkpoint(plain, tmp_path / "out", rounding="torchao")
    assert quality["rounding"] == "torchao"
    tensors = load_file(plain / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    packed = get_format("nvfp4").quantize(tensors[name], rounding="torchao")
    assert torch.equal(stored(tmp_path / "out")[f"{name}_packed"], packed.tensors["packed"])


def test_an_existing_folder_is_refused_and_left_alone(plain, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        quantize_checkpoint(plain, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_failure_leaves_nothing_behind(plain, tmp_path):
    source = tmp_path / "nan"
    write_tiny(source)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"][0, 0] = torch.nan
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FormatError, match=r"model\.layers\.2\.mlp\.down_proj\.weight.*NaN"):
        quantize_checkpoint(source, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nan"]


def test_a_quantized_source_is_refused(quantized, tmp_path):
    with pytest.raises(CheckpointError, match="quantized already"):
        quantize_checkpoint(quantized[0], tmp_path / "again")


def test_an_index_that_names_a_missing_shard_is_refused(tmp_path):
    source = tmp_path / "sharded"
    write_tiny(source, shard_size="20KB")
    gone = sorted(source.glob("*.safetensors"))[2]
    gone.unlink()
    with pytest.raises(CheckpointError, match=gone.name):
        quantize_checkpoint(source, tmp_path / "out")


def test_a_truncated_file_is_refused(tmp_path):
    source = tmp_path / "cut"
    write_tiny(source)
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        quantize_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


def test_a_missing_projection_is_refused_by_name(tmp_path):
    source = tmp_path / "incomplete"
    write_tiny(source)
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        quantize_checkpoint(source, tmp_path / "out")


def test_inputs_that_do_not_fill_blocks_are_refused(tmp_path):
    source = tmp_path / "odd"
    write_tiny(source, intermediate_size=100)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.down_proj.*100 inputs.*multiple of 16"):
        quantize_checkpoint(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"format": "bf16"}, ConfigError, "format=bf16.*nvfp4, mxfp4.*plain checkpoint"),
        ({"format": "nf4"}, ConfigError, "format=nf4.*quantized at load"),
        ({"method": "awq"}, ConfigError, "needs calibration text.*--calibration"),
        ({"method": "gptqq"}, ConfigError, "gptqq.*Did you mean gptq"),
        ({"format": "mxfp4", "method": "four_over_six"}, ConfigError, "mxfp4.*four_over_six.*rtn, mse"),
        ({"rounding": "up"}, FormatError, "'up'.*ct or torchao"),
    ],
)
def test_unknown_requests_are_refused(plain, tmp_path, settings, error, message):
    with pytest.raises(error, match=message):
        quantize_checkpoint(plain, tmp_path / "out", **settings)

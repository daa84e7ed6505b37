"""Which weights a loaded model really has, in every format and from plain and quantized folders."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import decoder_logits, load_tiny, random_tokens, transformers_logits, write_tiny

from qerl.config.schema import QuantConfig
from qerl.errors import CheckpointError, ConfigError, FormatError
from qerl.formats import dequantize, get_format
from qerl.model.checkpoint import base_hash, norm_hash, resolve_model_path
from qerl.model.spec import ModelSpec
from qerl.model.storage import group_formats

NVFP4 = QuantConfig(format="nvfp4")
SEQUENCES = random_tokens((14, 33))
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def pack_folder(folder, *, name="nvfp4", leave_plain=(), activations=False):
    """Turn a plain tiny folder into a quantized one, each projection with a global scale of its own."""
    plain = load_file(folder / "model.safetensors")
    layout = get_format(name).layout
    stored = {}
    for tensor_name, tensor in plain.items():
        module = tensor_name.removesuffix(".weight")
        is_bias = tensor_name.endswith(".bias")
        if module.rsplit(".", 1)[-1] not in PROJECTIONS or is_bias or module in leave_plain:
            stored[tensor_name] = tensor
            continue
        tensors = get_format(name).quantize(tensor).tensors
        stored |= {f"{module}.{suffix}": tensors[key] for key, suffix in layout.suffixes.items()}
        if activations:
            stored[f"{module}.input_global_scale"] = torch.ones(1)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False, **layout.weights}
    group = {"targets": ["Linear"], "weights": weights, "format": layout.name}
    if activations:
        group["input_activations"] = {**weights, "dynamic": "local"}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": layout.name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", *leave_plain],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return stored


def set_linears(reference, model):
    """Give a transformers model the weights that ours stands for."""
    for linear in model.grouped_linears():
        target = reference.model.get_submodule(linear.name.rsplit(".", 1)[0])
        for part, rows in zip(linear.parts, dequantize(linear.weight).split(linear.sizes), strict=True):
            target.get_submodule(part).weight.data.copy_(rows)


@pytest.mark.parametrize(
    "quant",
    [
        {"format": "mxfp4"},
        {"format": "mxfp4", "method": "mse"},
        {"format": "nf4"},
        {"format": "nf4", "double_quant": True},
        {"format": "nf4", "method": "mse"},
        {"method": "mse"},
        {"method": "four_over_six", "rounding": "torchao"},
        {"format": "nf4", "overrides": {"*.down_proj": "bf16", "layers.1.mlp.*": "mxfp4", "*.o_proj": "nvfp4"}},
    ],
    ids=str,
)
def test_every_format_runs_as_transformers_with_its_rounded_weights(tmp_path, quant):
    reference = write_tiny(tmp_path, "llama-plain")
    cached, model = (load_tiny(tmp_path, quant=QuantConfig(dense_cache=cache, **quant)) for cache in ("on", "off"))
    set_linears(reference, model)
    expected = transformers_logits(reference, SEQUENCES)
    assert (decoder_logits(model, SEQUENCES) - expected).abs().max() < 1e-4
    assert (decoder_logits(cached, SEQUENCES) - expected).abs().max() < 1e-4
    assert (decoder_logits(load_tiny(tmp_path), SEQUENCES) - expected).abs().max() > 0.05


def test_settings_reach_the_quantizer(tmp_path):
    reference = write_tiny(tmp_path)
    down = reference.model.layers[0].mlp.down_proj.weight.detach()
    for quant, name in (
        ({"format": "nf4"}, "nf4"),
        ({"format": "nf4", "double_quant": True}, "nf4_dq"),
        ({"format": "mxfp4", "method": "mse"}, "mxfp4"),
        ({"method": "four_over_six"}, "nvfp4"),
    ):
        weight = load_tiny(tmp_path, quant=QuantConfig(**quant)).layers[0].down.weight
        expected = get_format(name).quantize(down, method=quant.get("method", "rtn"))
        assert weight.format == name
        for key, tensor in expected.tensors.items():
            assert torch.equal(weight.tensors[key].view(torch.uint8), tensor.view(torch.uint8)), (quant, key)


def test_nf4_quantizes_each_projection_of_a_group_by_itself(tmp_path):
    reference = write_tiny(tmp_path, hidden_size=48, num_attention_heads=3, num_key_value_heads=1)
    model = load_tiny(tmp_path, quant=QuantConfig(format="nf4", double_quant=True))
    attention = reference.model.layers[2].self_attn
    expected = [
        get_format("nf4_dq").quantize(p.weight.detach()) for p in (attention.q_proj, attention.k_proj, attention.v_proj)
    ]
    joined = get_format("nf4_dq").join(expected)
    for key, tensor in model.layers[2].qkv.weight.tensors.items():
        assert torch.equal(tensor, joined.tensors[key]), key


@pytest.mark.parametrize("variant", ["qwen2-tied", "qwen3-wide-heads"])
@pytest.mark.parametrize("dense_cache", ["on", "off"])
def test_a_quantized_model_equals_transformers_with_the_rounded_weights(tmp_path, variant, dense_cache):
    reference = write_tiny(tmp_path, variant)
    model = load_tiny(tmp_path, quant=QuantConfig(dense_cache=dense_cache))
    exact = decoder_logits(load_tiny(tmp_path), SEQUENCES)
    assert all((linear.dense_OI is not None) == (dense_cache == "on") for linear in model.grouped_linears())
    set_linears(reference, model)
    expected = transformers_logits(reference, SEQUENCES)
    assert (decoder_logits(model, SEQUENCES) - expected).abs().max() < 1e-4
    assert (exact - expected).abs().max() > 0.05


def test_a_fused_group_is_quantized_as_one_tensor_in_float32(tmp_path):
    reference = write_tiny(tmp_path, "llama-plain", dtype=torch.bfloat16)
    model = load_tiny(tmp_path, quant=NVFP4)
    attention = reference.model.layers[1].self_attn
    stacked = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]).detach().float()
    weight = model.layers[1].qkv.weight
    expected = get_format("nvfp4").quantize(stacked)
    assert weight.segments == (64, 32, 32)
    assert torch.equal(weight.tensors["packed"], expected.tensors["packed"])
    assert torch.equal(weight.tensors["global_scale"], (2688 / stacked.abs().max()).repeat(3))


def test_named_rounding_reaches_the_quantizer(tmp_path):
    write_tiny(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name][0, :16] = -0.0  # the roundings differ in the sign of zero
    save_file(tensors, file)
    for rounding in ("ct", "torchao"):
        model = load_tiny(tmp_path, quant=QuantConfig(rounding=rounding))
        expected = get_format("nvfp4").quantize(tensors[name], rounding=rounding).tensors["packed"]
        assert torch.equal(model.layers[0].down.weight.tensors["packed"], expected)
        assert bool(expected[0, :8].any()) == (rounding == "torchao")


def test_unquantized_weights_are_held_once_in_the_compute_type(tmp_path):
    write_tiny(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        linear = load_tiny(tmp_path, dtype=dtype).layers[0].down
        assert linear.weight.tensors["weight"].dtype == dtype
        assert linear.dense_OI.data_ptr() == linear.weight.tensors["weight"].data_ptr()


def test_overrides_choose_by_pattern_and_the_last_match_wins(tmp_path):
    write_tiny(tmp_path)
    overrides = {"layers.0.*": "bf16", "*.down_proj": "nvfp4", "layers.2.self_attn.[qkv]_proj": "bf16"}
    model = load_tiny(tmp_path, quant=QuantConfig(overrides=overrides))
    formats = {linear.name: linear.weight.format for linear in model.grouped_linears()}
    assert [name for name, value in formats.items() if value == "bf16"] == [
        "layers.0.self_attn.qkv_proj",
        "layers.0.self_attn.o_proj",
        "layers.0.mlp.gate_up_proj",
        "layers.2.self_attn.qkv_proj",
    ]


def test_overrides_that_match_nothing_or_split_a_group_are_refused(tmp_path):
    write_tiny(tmp_path)
    with pytest.raises(ConfigError, match=r"matches no projection.*layers\.7"):
        load_tiny(tmp_path, quant=QuantConfig(overrides={"layers.7.*": "bf16"}))
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.gate_up_proj.*different formats"):
        load_tiny(tmp_path, quant=QuantConfig(overrides={"layers.1.mlp.up_proj": "bf16"}))


def test_planning_needs_no_tensors(tmp_path):
    write_tiny(tmp_path)
    formats = group_formats(ModelSpec.from_folder(tmp_path), QuantConfig(overrides={"*o_proj": "bf16"}))
    assert len(formats) == 12
    assert formats["layers.1.self_attn.o_proj"] == "bf16"


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_a_quantized_folder_is_read_as_transformers_reads_it(tmp_path, name):
    """Scales that differ inside a fused group included; transformers unpacks to bfloat16 by compressed-tensors."""
    write_tiny(tmp_path, "llama-all-biases-wide-heads", intermediate_size=128)
    pack_folder(tmp_path, name=name)
    model = load_tiny(tmp_path, quant=QuantConfig(format=name))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    transformers_logits(theirs, [SEQUENCES[0]])  # it unpacks at the first call
    for linear in model.grouped_linears():
        assert linear.weight.format == name
        owner = theirs.model.get_submodule(linear.name.rsplit(".", 1)[0])
        rows = dequantize(linear.weight, torch.bfloat16).split(linear.sizes)
        for part, own in zip(linear.parts, rows, strict=True):
            assert torch.equal(own, owner.get_submodule(part).weight.bfloat16()), (linear.name, part)
    if name == "nvfp4":
        assert len(set(model.layers[0].qkv.weight.tensors["global_scale"].tolist())) == 3


def test_a_folder_with_quantized_activations_gives_its_weights_and_says_so(tmp_path):
    write_tiny(tmp_path / "plain")
    write_tiny(tmp_path / "w4a4")
    pack_folder(tmp_path / "plain")
    pack_folder(tmp_path / "w4a4", activations=True)
    with pytest.warns(UserWarning, match="activation scales are not"):
        model = load_tiny(tmp_path / "w4a4", quant=NVFP4)
    expected = decoder_logits(load_tiny(tmp_path / "plain", quant=NVFP4), SEQUENCES)
    assert torch.equal(decoder_logits(model, SEQUENCES), expected)


def test_an_mxfp4_folder_asks_for_its_format(tmp_path):
    write_tiny(tmp_path, intermediate_size=128)
    pack_folder(tmp_path, name="mxfp4")
    with pytest.raises(ConfigError, match=r"holds MXFP4 weights.*quant\.format=nvfp4.*expected quant\.format=mxfp4"):
        load_tiny(tmp_path, quant=NVFP4)


@pytest.mark.parametrize("dense_cache", ["on", "off"])
def test_logits_of_a_quantized_folder_use_each_members_own_scale(tmp_path, dense_cache):
    reference = write_tiny(tmp_path)
    pack_folder(tmp_path)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name.removesuffix(".weight").rsplit(".", 1)[-1] in PROJECTIONS and name.endswith(".weight"):
                parameter.copy_(dequantize(get_format("nvfp4").quantize(parameter)))
    model = load_tiny(tmp_path, quant=QuantConfig(dense_cache=dense_cache))
    expected = transformers_logits(reference, SEQUENCES)
    assert (decoder_logits(model, SEQUENCES) - expected).abs().max() < 1e-4


def test_a_quantized_folder_decides_its_own_formats(tmp_path):
    write_tiny(tmp_path)
    pack_folder(tmp_path, leave_plain=("model.layers.0.mlp.down_proj",))
    model = load_tiny(tmp_path, quant=NVFP4)
    assert model.layers[0].down.weight.format == "bf16"
    assert model.layers[1].down.weight.format == "nvfp4"
    with pytest.raises(ConfigError, match=r"holds NVFP4 weights.*quant\.format=bf16"):
        load_tiny(tmp_path)
    with pytest.raises(ConfigError, match=r"contradicts the quantized model folder for layers\.1\.mlp\.down_proj"):
        load_tiny(tmp_path, quant=QuantConfig(overrides={"layers.1.mlp.down_proj": "bf16"}))


def test_a_quantized_folder_with_a_half_packed_group_is_refused(tmp_path):
    write_tiny(tmp_path)
    pack_folder(tmp_path, leave_plain=("model.layers.0.mlp.up_proj",))
    with pytest.raises(ConfigError, match="different formats"):
        load_tiny(tmp_path, quant=NVFP4)


def test_a_broken_global_scale_is_named(tmp_path):
    write_tiny(tmp_path)
    stored = pack_folder(tmp_path)
    name = "model.layers.2.mlp.up_proj.weight_global_scale"
    save_file({**stored, name: torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match=r"layers\.2\.mlp\.up_proj"):
        load_tiny(tmp_path, quant=NVFP4)


def test_hashes_tell_bases_apart_and_repeat(tmp_path):
    write_tiny(tmp_path / "one")
    write_tiny(tmp_path / "two", seed=1)
    one, two = load_tiny(tmp_path / "one"), load_tiny(tmp_path / "two")
    assert base_hash(one) == base_hash(load_tiny(tmp_path / "one"))
    assert len({base_hash(one), base_hash(two), base_hash(load_tiny(tmp_path / "one", quant=NVFP4))}) == 3
    assert norm_hash(one) != norm_hash(two)
    assert len(base_hash(one)) == 16
    before = norm_hash(one)
    with torch.no_grad():
        one.layers[0].mlp_norm[3] += 1e-3
    assert norm_hash(one) != before


def test_models_are_found_by_folder_or_by_name(tmp_path, monkeypatch):
    (tmp_path / "SmolLM2-135M-Instruct").mkdir()
    monkeypatch.setenv("QERL_MODELS", str(tmp_path))
    assert resolve_model_path("SmolLM2-135M-Instruct") == tmp_path / "SmolLM2-135M-Instruct"
    assert resolve_model_path(str(tmp_path)) == tmp_path
    assert resolve_model_path("demo").name == "demo_model"
    with pytest.raises(
        CheckpointError, match=r"cannot be found; got SmolLM2-135M;.*Did you mean SmolLM2-135M-Instruct"
    ):
        resolve_model_path("SmolLM2-135M")
    # Another size is another model.
    with pytest.raises(CheckpointError, match=r"got SmolLM2-1.7B-Instruct; [^?]*$"):
        resolve_model_path("SmolLM2-1.7B-Instruct")
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointError, match=r"model.gguf; .*That is a file: give its folder"):
        resolve_model_path(str(tmp_path / "model.gguf"))
    with pytest.raises(CheckpointError, match=r"hf download owner/SmolLM2-1.7B --local-dir SmolLM2-1.7B, and"):
        resolve_model_path("owner/SmolLM2-1.7B")
    # What begins with a folder that is there is a path; a name that is known is what was meant.
    with pytest.raises(CheckpointError, match=r"SmolLM2-1\.7B; (?!.*hf download)"):
        resolve_model_path(str(tmp_path / "SmolLM2-1.7B"))
    with pytest.raises(CheckpointError, match=r"Did you mean SmolLM2-135M-Instruct\?$"):
        resolve_model_path("HuggingFaceTB/SmolLM2-135M")
    monkeypatch.delenv("QERL_MODELS")
    with pytest.raises(CheckpointError, match="Set QERL_MODELS"):
        resolve_model_path("SmolLM2-135M-Instruct")

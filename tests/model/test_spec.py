"""What is read from config.json, and what is refused by name."""

import json
import subprocess
import sys

import pytest

from qerl.errors import CheckpointError
from qerl.model.spec import ModelSpec

QWEN2 = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "eos_token_id": 151645,
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "eos_token_id": [128001, 128008, 128009],
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
MISTRAL = {**LLAMA, "model_type": "mistral", "rope_scaling": None, "sliding_window": None, "eos_token_id": 2}
QWEN3 = {**QWEN2, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 128}


def test_qwen2_values_are_read():
    spec = ModelSpec.from_config(QWEN2)
    assert (spec.head_dim, spec.num_kv_heads, spec.q_size, spec.kv_size) == (64, 2, 896, 128)
    assert spec.rope.theta == 1e6
    assert spec.rope.kind == "default"
    assert spec.qkv_bias
    assert not spec.o_bias
    assert not spec.qk_norm
    assert spec.tie_embeddings
    assert spec.eos_token_ids == (151645,)


def test_llama3_rope_and_several_eos_ids_are_read():
    spec = ModelSpec.from_config(LLAMA)
    assert (spec.rope.kind, spec.rope.factor, spec.rope.original_max_positions) == ("llama3", 32.0, 8192)
    assert spec.eos_token_ids == (128001, 128008, 128009)
    assert not spec.qkv_bias


def test_old_and_new_spelling_of_rope_agree():
    new = {k: v for k, v in LLAMA.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {**LLAMA["rope_scaling"], "rope_theta": 500000.0}
    assert ModelSpec.from_config(new).rope == ModelSpec.from_config(LLAMA).rope
    older = {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert ModelSpec.from_config(older).rope.kind == "linear"


def test_qwen3_has_head_norms_and_its_own_head_dim():
    spec = ModelSpec.from_config({k: v for k, v in QWEN3.items() if k != "head_dim"})
    assert spec.qk_norm
    assert spec.head_dim == 128
    assert spec.q_size == 14 * 128
    assert not spec.qkv_bias


def test_groups_list_every_projection_with_its_shape():
    shapes = {shape.name: shape for shape in ModelSpec.from_config(QWEN2).groups()}
    assert shapes["qkv_proj"].sizes == (896, 128, 128)
    assert shapes["qkv_proj"].bias
    assert shapes["down_proj"].in_features == 4864
    assert shapes["gate_up_proj"].part_names(3) == ("layers.3.mlp.gate_proj", "layers.3.mlp.up_proj")
    assert shapes["qkv_proj"].group_name(0) == "layers.0.self_attn.qkv_proj"


def packed(**changes):
    """A quantization_config of compressed-tensors; what is not a key of it changes the weights' arguments."""
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    config = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"g": {"weights": {**weights, **{k: v for k, v in changes.items() if k in weights}}}},
    }
    return config | {k: v for k, v in changes.items() if k not in weights}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**QWEN2, "model_type": "gemma2"}, "model_type is not supported; got gemma2"),
        ({**QWEN2, "model_type": ["qwen2"]}, "model_type is not supported"),
        ({**QWEN2, "rms_norm_eps": float("nan")}, "rms_norm_eps is unusable; got nan"),
        ({**QWEN2, "model_type": "qwen2_moe"}, "closest supported architecture is qwen2"),
        ({**QWEN2, "num_experts": 60}, "mixture-of-experts"),
        ({**LLAMA, "num_local_experts": 8}, "mixture-of-experts"),
        ({**QWEN2, "architectures": ["Qwen2ForSequenceClassification"]}, "not a causal language model"),
        ({**QWEN2, "use_sliding_window": True, "sliding_window": 4096}, "sliding_window=4096"),
        (
            {**QWEN2, "use_sliding_window": True, "sliding_window": 64, "layer_types": ["sliding_attention"] * 24},
            "sliding-window",
        ),
        ({**MISTRAL, "sliding_window": 4096}, "sliding-window"),
        ({k: v for k, v in MISTRAL.items() if k != "sliding_window"}, "sliding_window=4096"),
        ({**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type=yarn"),
        ({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type=dynamic"),
        ({**LLAMA, "rope_scaling": {"rope_type": "linear"}}, "rope factor"),
        ({**LLAMA, "rope_scaling": None, "rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "per layer type"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({**QWEN2, "hidden_act": "gelu"}, "hidden_act"),
        ({**LLAMA, "num_key_value_heads": 5}, "do not divide"),
        ({**LLAMA, "head_dim": 63}, "odd"),
        ({**QWEN2, "vocab_size": "many"}, "vocab_size is unusable; got many"),
        ({k: v for k, v in QWEN2.items() if k != "num_hidden_layers"}, "num_hidden_layers"),
        ({**QWEN2, "quantization_config": {"quant_method": "gptq", "bits": 4}}, "quant_method=gptq"),
        ({**QWEN2, "quantization_config": packed(format="float-quantized")}, "format=float-quantized"),
        ({**QWEN2, "quantization_config": packed(kv_cache_scheme={"num_bits": 8})}, "quantized KV cache"),
        ({**QWEN2, "quantization_config": packed(transform_config={"config_groups": {}})}, "rotations"),
        ({**QWEN2, "quantization_config": packed(config_groups={})}, "names no config_groups"),
        (
            {**QWEN2, "quantization_config": packed(config_groups={"g": {"format": "float-quantized"}})},
            "config_groups.g has a layout of its own; got float-quantized",
        ),
        ({**QWEN2, "quantization_config": packed(num_bits=8)}, "num_bits=8.*num_bits=4"),
        ({**QWEN2, "quantization_config": packed(group_size=32)}, "group_size=32.*group_size=16"),
        ({**QWEN2, "quantization_config": packed(symmetric=False)}, "symmetric=False"),
        ({**QWEN2, "quantization_config": packed(type="int")}, "config_groups.g.weights.*type='int'"),
    ],
)
def test_unsupported_models_are_refused_by_name(config, message):
    with pytest.raises(CheckpointError, match=message):
        ModelSpec.from_config(config)


def test_a_window_that_no_layer_uses_or_no_sequence_reaches_is_plain_attention():
    assert ModelSpec.from_config({**MISTRAL, "sliding_window": 131072}).architecture == "mistral"
    unused = {**QWEN2, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 24}
    assert ModelSpec.from_config(unused).num_layers == 24


def test_folder_errors_name_the_file(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        ModelSpec.from_folder(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        ModelSpec.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{ not json")
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        ModelSpec.from_folder(tmp_path)
    with pytest.raises(CheckpointError, match="not a folder"):
        ModelSpec.from_folder(tmp_path / "config.json")


def test_spec_and_storage_are_free_of_torch():
    code = "import sys, qerl.model.spec, qerl.model.storage; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_spec_reads_what_transformers_writes(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN2))
    assert ModelSpec.from_folder(tmp_path) == ModelSpec.from_config(QWEN2)


def test_packed_folders_name_their_format_and_what_is_left_out():
    plain = ModelSpec.from_config(QWEN2)
    assert (plain.packed_layout, plain.stored_format, plain.notes) == (None, None, ())
    weight_only = ModelSpec.from_config({**QWEN2, "quantization_config": packed()})
    assert (weight_only.stored_format, weight_only.notes) == ("nvfp4", ())
    mxfp4 = packed(format="mxfp4-pack-quantized", group_size=32)
    assert ModelSpec.from_config({**QWEN2, "quantization_config": mxfp4}).stored_format == "mxfp4"
    with_activations = packed()
    with_activations["config_groups"]["g"]["input_activations"] = {"num_bits": 4, "dynamic": "local"}
    (note,) = ModelSpec.from_config({**QWEN2, "quantization_config": with_activations}).notes
    assert "activation scales are not" in note

"""Folded channel scales change nothing until weights are rounded, and can be taken out of an adapter again."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import decoder_logits, load_tiny, random_tokens, randomize_adapters, write_tiny

from qerl.config.schema import LoraConfig
from qerl.errors import CheckpointError
from qerl.model.checkpoint import adapter_lora_config, load_adapter, save_adapter
from qerl.quantize.folding import (
    FOLDS_FILE,
    fold_name,
    fold_norm,
    fold_rows,
    spread_heads,
    tie_heads,
    unfold_adapter,
    unfold_tensors,
)
from qerl.quantize.layer_tensors import NORMS, read_layer
from qerl.quantize.source import CheckpointSource

VARIANTS = [
    "qwen2-untied-theta",
    "llama-all-biases-wide-heads",
    "llama-one-kv-head-tied",
    "qwen3-bias-tied",
    "mistral-plain",
]


def fold(folder, out, seed=0, spread=4.0):
    """Write a copy of a checkpoint with random scales folded into every layer; returns the scales."""
    source = CheckpointSource(folder)
    spec, tensors, folds = source.spec, load_file(folder / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(seed)

    def scales(size):
        return spread ** (2 * torch.rand(size, generator=generator) - 1)

    for index in range(spec.num_layers):
        layer = read_layer(spec, source, index, torch.device("cpu"))
        places = {
            "attn_norm": fold_norm(layer, "attn_norm", "qkv", scales(spec.hidden_size)),
            "v": fold_rows(layer, "qkv", slice(spec.q_size + spec.kv_size, None), "o", scales(spec.kv_size), spec),
            "mlp_norm": fold_norm(layer, "mlp_norm", "gate_up", scales(spec.hidden_size)),
            "up": fold_rows(
                layer, "gate_up", slice(spec.intermediate_size, None), "down", scales(spec.intermediate_size), spec
            ),
        }
        places["o"] = spread_heads(places["v"], spec)
        folds |= {fold_name(index, place): value for place, value in places.items()}
        for shape in spec.groups():
            names = [f"model.{name}" for name in shape.part_names(index)]
            weights = layer.weights[shape.attribute].split(shape.sizes)
            tensors |= {f"{name}.weight": weight.clone() for name, weight in zip(names, weights, strict=True)}
            if shape.bias:
                biases = layer.biases[shape.attribute].split(shape.sizes)
                tensors |= {f"{name}.bias": bias.clone() for name, bias in zip(names, biases, strict=True)}
        for key, name in NORMS.items():
            tensors[f"model.layers.{index}.{name}.weight"] = layer.norms[key]
    out.mkdir()
    (out / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    save_file(folds, out / FOLDS_FILE)
    (out / "qerl_quantization.json").write_text(json.dumps({"source": {"name": folder.name}}))
    return folds


def logits_float64(model, folder):
    """Logits of the transformers model with the weights in `folder`, all in float64."""
    state = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    model.load_state_dict(state, strict=False)
    return torch.cat([model.double()(input_ids=tokens[None]).logits[0] for tokens in random_tokens((9, 5))]).detach()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_unchanged_in_float64(variant, tmp_path):
    model = write_tiny(tmp_path / "plain", variant, dtype=torch.float64)
    fold(tmp_path / "plain", tmp_path / "folded")
    plain, folded = (logits_float64(model, tmp_path / name) for name in ("plain", "folded"))
    assert plain.dtype == torch.float64
    torch.testing.assert_close(folded, plain, rtol=0, atol=1e-11)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "folded"))
    changed = {name for name, tensor in before.items() if not torch.equal(after[name], tensor)}
    assert {"model.layers.0.input_layernorm.weight", "model.layers.2.mlp.down_proj.weight"} <= changed
    assert not any("q_norm" in name or "k_norm" in name or "embed" in name for name in changed)


@pytest.mark.parametrize("variant", VARIANTS)
def test_norms_and_biases_of_a_bfloat16_checkpoint_are_not_rounded_by_folding(variant, tmp_path):
    """Scales are chosen so that what stays unquantized is exact in bfloat16; only the float32 weights round, by 1e-7."""
    model = write_tiny(tmp_path / "plain", variant, dtype=torch.bfloat16)
    folds = fold(tmp_path / "plain", tmp_path / "folded")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "folded"))
    for name, tensor in after.items():
        expected = torch.float32 if name.endswith("_proj.weight") else torch.bfloat16
        assert tensor.dtype == expected, name
    norm = "model.layers.1.input_layernorm.weight"
    product = after[norm].double() * folds["layers.1.attn_norm"]
    torch.testing.assert_close(product, before[norm].double(), rtol=1e-15, atol=0)
    plain, folded = (logits_float64(model, tmp_path / name) for name in ("plain", "folded"))
    torch.testing.assert_close(folded, plain, rtol=0, atol=1e-5)


def test_norm_scales_and_biases_of_zero_are_left_alone(tmp_path):
    model = write_tiny(tmp_path / "plain", "llama-all-biases-wide-heads", dtype=torch.float64)
    path = tmp_path / "plain" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.input_layernorm.weight"][3] = 0
    tensors["model.layers.0.self_attn.v_proj.bias"][5] = 0
    tensors["model.layers.0.mlp.up_proj.bias"][7] = 5e-324
    save_file(tensors, path, metadata={"format": "pt"})
    folds = fold(tmp_path / "plain", tmp_path / "folded")
    assert folds["layers.0.attn_norm"][3] == 1
    assert all(torch.isfinite(scales).all() and (scales > 0).all() for scales in folds.values())
    plain, folded = (logits_float64(model, tmp_path / name) for name in ("plain", "folded"))
    torch.testing.assert_close(folded, plain, rtol=0, atol=1e-11)


def test_heads_that_share_a_value_head_share_its_scales(tmp_path):
    write_tiny(tmp_path / "plain", "qwen2-tied")
    spec = CheckpointSource(tmp_path / "plain").spec
    values = torch.arange(float(spec.q_size))
    tied = tie_heads(values, spec)
    assert tied.numel() == spec.kv_size
    assert float(tied[0]) == (0 + spec.head_dim) / 2
    spread = spread_heads(tied, spec).view(spec.num_heads, spec.head_dim)
    assert torch.equal(spread[0], spread[1])
    assert torch.equal(spread[2], spread[3])
    assert not torch.equal(spread[0], spread[2])


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_adapter_of_the_folded_model_fits_the_plain_one_when_unfolded(variant, tmp_path):
    """The same logits from both, in float32, norms trained too."""
    write_tiny(tmp_path / "plain", variant)
    fold(tmp_path / "plain", tmp_path / "folded")
    lora = LoraConfig(rank=4, alpha=8.0)
    folded = load_tiny(tmp_path / "folded", lora=lora)
    randomize_adapters(folded)
    save_adapter(folded, tmp_path / "adapter", base_path="folded", lora=lora)
    unfold_adapter(tmp_path / "adapter", tmp_path / "folded", tmp_path / "unfolded")
    plain = load_tiny(tmp_path / "plain", lora=adapter_lora_config(tmp_path / "unfolded"))
    untrained = decoder_logits(plain, random_tokens((9, 5)))
    load_adapter(plain, tmp_path / "unfolded")
    ours, theirs = (decoder_logits(model, random_tokens((9, 5))) for model in (plain, folded))
    assert (theirs - untrained).abs().max() > 0.5
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)
    config = json.loads((tmp_path / "unfolded" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "plain"


def test_unfolded_adapters_are_exact_in_float64(tmp_path):
    """Merged into the weights: plain + unfolded = folded + adapter, up to the scales."""
    model = write_tiny(tmp_path / "plain", "llama-all-biases-wide-heads", dtype=torch.float64)
    folds = fold(tmp_path / "plain", tmp_path / "folded")
    generator = torch.Generator().manual_seed(5)
    tensors = {name: load_file(tmp_path / name / "model.safetensors") for name in ("plain", "folded")}
    adapter = {}
    for name, weight in tensors["plain"].items():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        if name.endswith("_proj.weight"):
            adapter[f"{key}.lora_A.weight"] = torch.randn(3, weight.shape[1], generator=generator).double()
            adapter[f"{key}.lora_B.weight"] = torch.randn(weight.shape[0], 3, generator=generator).double()
    for name, matrices in {"folded": adapter, "plain": unfold_tensors(adapter, folds)}.items():
        for key in [key for key in matrices if key.endswith("lora_A.weight")]:
            weight = key.removeprefix("base_model.model.").removesuffix("lora_A.weight") + "weight"
            b = matrices[key.replace("lora_A", "lora_B")]
            tensors[name][weight] = tensors[name][weight] + 0.01 * b @ matrices[key]
        save_file(tensors[name], tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    plain, folded = (logits_float64(model, tmp_path / name) for name in ("plain", "folded"))
    torch.testing.assert_close(folded, plain, rtol=0, atol=1e-10)


def test_relative_noise_is_the_same_on_the_folded_scale_and_absolute_noise_is_not(tmp_path):
    """z = sigma |n'| on the folded norm n' = n / s reaches the weights times s: that is sigma |n| of the plain one."""
    from tiny_models import pack

    from qerl.model.aqn import NoiseState

    write_tiny(tmp_path / "plain", "qwen2-untied-theta")
    fold(tmp_path / "plain", tmp_path / "folded")
    models = [load_tiny(tmp_path / name) for name in ("plain", "folded")]
    tokens_T, context = pack(random_tokens((9, 5)))
    outcomes = {}
    for magnitude in ("relative", "absolute"):
        state = NoiseState(seed=1, rollout=0, stage=1, sigma=0.1, sites=("attn_norm", "mlp_norm"), magnitude=magnitude)
        with torch.no_grad():
            outcomes[magnitude] = [m.logits(m(tokens_T, context, noise=state.materialize(m))) for m in models]
    torch.testing.assert_close(*outcomes["relative"], rtol=0, atol=2e-4)
    assert (outcomes["absolute"][0] - outcomes["absolute"][1]).abs().max() > 0.05


def test_what_does_not_fit_is_refused(tmp_path):
    write_tiny(tmp_path / "plain", "qwen2-tied")
    folds = fold(tmp_path / "plain", tmp_path / "folded")
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
    with pytest.raises(CheckpointError, match=r"down_proj\.lora_A.*\[4, 99\].*112 channels"):
        unfold_tensors({name: torch.zeros(4, 99)}, folds)
    with pytest.raises(CheckpointError, match="no such layer"):
        unfold_tensors({name.replace("layers.0", "layers.7"): torch.zeros(4, 112)}, folds)
    with pytest.raises(CheckpointError, match=r"lm_head.*not one of a plain LoRA"):
        unfold_tensors({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64)}, folds)
    lora = LoraConfig(rank=4)
    model = load_tiny(tmp_path / "plain", lora=lora)
    save_adapter(model, tmp_path / "adapter", base_path="x", lora=lora)
    with pytest.raises(CheckpointError, match=r"no channel scales.*awq or best"):
        unfold_adapter(tmp_path / "adapter", tmp_path / "plain", tmp_path / "out")
    with pytest.raises(CheckpointError, match="exists already"):
        unfold_adapter(tmp_path / "adapter", tmp_path / "folded", tmp_path / "plain")


def test_an_adapter_leaves_an_interrupted_quantization_of_its_name_alone(tmp_path):
    write_tiny(tmp_path / "plain", "qwen2-tied")
    fold(tmp_path / "plain", tmp_path / "folded")
    lora = LoraConfig(rank=4)
    save_adapter(load_tiny(tmp_path / "plain", lora=lora), tmp_path / "adapter", base_path="x", lora=lora)
    interrupted = tmp_path / "out.partial"
    interrupted.mkdir()
    (interrupted / "layer-00000.safetensors").write_bytes(b"hours of work")
    unfold_adapter(tmp_path / "adapter", tmp_path / "folded", tmp_path / "out")
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    assert (interrupted / "layer-00000.safetensors").read_bytes() == b"hours of work"

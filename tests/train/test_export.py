"""Exports load elsewhere: merged models in transformers with equal logits, adapters in PEFT."""

import json

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file
from tiny_models import decoder_logits, load_tiny, random_tokens, randomize_adapters, transformers_logits, write_tiny

from qerl.config.schema import LoraConfig, QuantConfig
from qerl.errors import CheckpointError, ConfigError
from qerl.model.checkpoint import load_adapter, save_adapter
from qerl.quantize import quantize_checkpoint
from qerl.train.export import export_adapter, merge

SEQUENCES = random_tokens((17, 40))
LORA = LoraConfig(rank=4, alpha=6.0)
PLAIN = QuantConfig(format="bf16")


def adapted(folder, variant, quant=PLAIN, lora=LORA):
    """A tiny base and a random adapter with moved norms on it; the model with both."""
    write_tiny(folder / "base", variant)
    model = load_tiny(folder / "base", quant=quant, lora=lora)
    randomize_adapters(model)
    with torch.no_grad():
        for layer in model.layers:
            layer.mlp_norm.mul_(1.0 + 0.1 * torch.sin(torch.arange(layer.mlp_norm.numel())))
    save_adapter(model, folder / "adapter", base_path=str(folder / "base"), lora=lora)
    return model


def loaded(folder, dtype=torch.float32):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@pytest.mark.parametrize("variant", ["qwen2-tied", "llama-all-biases-wide-heads", "qwen3-wide-heads"])
def test_a_merged_model_loads_in_transformers_with_the_logits_of_base_and_adapter(tmp_path, variant):
    model = adapted(tmp_path, variant)
    done = merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", quant=PLAIN, dtype=torch.float32)
    assert (done.projections, done.norms, done.files) == (3 * 7, 3 * 2, 1)
    merged = transformers_logits(loaded(tmp_path / "out"), SEQUENCES)
    assert (merged - decoder_logits(model, SEQUENCES)).abs().max() < 1e-4
    assert (merged - transformers_logits(loaded(tmp_path / "base"), SEQUENCES)).abs().max() > 0.05


def test_bfloat16_is_one_rounding_of_the_exact_sum_and_norms_stay_float32(tmp_path):
    adapted(tmp_path, "qwen3-bias-tied")
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", quant=PLAIN)
    base, adapter = (
        load_file(tmp_path / "base" / "model.safetensors"),
        load_file(tmp_path / "adapter" / "adapter_model.safetensors"),
    )
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert set(out) == set(base) - {"lm_head.weight"}
    for name, tensor in out.items():
        stem = "base_model.model." + name.removesuffix(".weight")
        exact = base[name].double()
        if f"{stem}.lora_A.weight" in adapter:
            exact = exact + 1.5 * adapter[f"{stem}.lora_B.weight"].double() @ adapter[f"{stem}.lora_A.weight"].double()
            assert tensor.dtype == torch.bfloat16
            # float32 sums may fall on the other side of a tie: one unit in the last place of bfloat16, rarely.
            assert (tensor != exact.to(torch.bfloat16)).double().mean() < 1e-3
            assert ((tensor.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-30).all()
        elif f"{stem}.weight" in adapter:
            assert torch.equal(tensor, adapter[f"{stem}.weight"])
        else:
            assert torch.equal(tensor.double(), exact.to(tensor.dtype).double())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    again = load_tiny(tmp_path / "out", quant=PLAIN)
    assert (
        transformers_logits(loaded(tmp_path / "out"), SEQUENCES) - decoder_logits(again, SEQUENCES)
    ).abs().max() < 1e-4


def test_shards_hold_what_one_file_holds(tmp_path):
    adapted(tmp_path, "llama-plain")
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "one", quant=PLAIN)
    done = merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "many", quant=PLAIN, shard_bytes=40_000)
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert done.files == len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all((tmp_path / "many" / name).stat().st_size < 45_000 for name in files)
    plain = (tmp_path / "many" / "config.json").stat().st_mode
    assert all((tmp_path / "many" / name).stat().st_mode == plain for name in files)
    whole, parts = loaded(tmp_path / "one").state_dict(), loaded(tmp_path / "many").state_dict()
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_trained_weights_give_the_policy_that_was_trained_and_plain_ones_another(tmp_path):
    quant = QuantConfig(format="nvfp4")
    model = adapted(tmp_path, "qwen2-untied-theta", quant)
    expected = decoder_logits(model, SEQUENCES)
    for weights, near in (("trained", True), ("plain", False)):
        out = tmp_path / weights
        merge(tmp_path / "base", tmp_path / "adapter", out, quant=quant, weights=weights, dtype=torch.float32)
        apart = (transformers_logits(loaded(out), SEQUENCES) - expected).abs().max()
        assert (apart < 1e-4) == near, (weights, apart)
        assert json.loads((out / "qerl_export.json").read_text())["weights"] == weights


def test_a_packed_base_is_refused_with_a_remedy_or_dequantized(tmp_path):
    adapted(tmp_path, "qwen2-tied")
    quantize_checkpoint(tmp_path / "base", tmp_path / "packed")
    quant = QuantConfig(format="nvfp4")
    with pytest.raises(ConfigError, match="--weights trained"):
        merge(tmp_path / "packed", tmp_path / "adapter", tmp_path / "out", quant=quant)
    assert not (tmp_path / "out").exists()
    merge(
        tmp_path / "packed", tmp_path / "adapter", tmp_path / "out", quant=quant, weights="trained", dtype=torch.float32
    )
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    model = load_tiny(tmp_path / "packed", quant=quant, lora=LORA)
    load_adapter(model, tmp_path / "adapter")
    apart = transformers_logits(loaded(tmp_path / "out"), SEQUENCES) - decoder_logits(model, SEQUENCES)
    assert apart.abs().max() < 1e-4


def test_an_adapter_of_another_base_leaves_nothing_behind(tmp_path):
    adapted(tmp_path, "qwen2-tied")
    write_tiny(tmp_path / "wide", "llama-all-biases-wide-heads")
    write_tiny(tmp_path / "short", "qwen2-tied", num_hidden_layers=2)
    for base, message in (("wide", "does not fit the base"), ("short", "has no place for")):
        with pytest.raises(CheckpointError, match=message):
            merge(tmp_path / base, tmp_path / "adapter", tmp_path / "out", quant=PLAIN)
        assert not (tmp_path / "out").exists()


def test_an_exported_adapter_is_what_peft_reads(tmp_path):
    model = adapted(tmp_path, "llama-plain")
    (tmp_path / "adapter" / "optimizer.pt").write_bytes(b"moments")
    export_adapter(tmp_path / "adapter", tmp_path / "out", base_name="owner/model")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert (
        json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == "owner/model"
    )
    theirs = PeftModel.from_pretrained(loaded(tmp_path / "base"), tmp_path / "out").eval()
    assert (transformers_logits(theirs, SEQUENCES) - decoder_logits(model, SEQUENCES)).abs().max() < 1e-4

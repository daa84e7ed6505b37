"""Adapters on disk: PEFT loads them with equal logits, and we load them back to the bit."""

import json

import pytest
import torch
import transformers
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_models import decoder_logits, load_tiny, random_tokens, randomize_adapters, transformers_logits, write_tiny

from qerl.config.schema import LoraConfig
from qerl.errors import CheckpointError
from qerl.model.checkpoint import adapter_hash, adapter_lora_config, load_adapter, norm_hash, save_adapter

SEQUENCES = random_tokens((17, 40))
LORA = LoraConfig(rank=4, alpha=6.0)


def plain_transformers(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture
def saved(tmp_path):
    """(base folder, adapter folder, model whose parameters are in it)."""
    write_tiny(tmp_path / "base", "qwen3-bias-tied")
    model = load_tiny(tmp_path / "base", lora=LORA)
    randomize_adapters(model)
    save_adapter(model, tmp_path / "adapter", base_path=str(tmp_path / "base"), lora=LORA)
    return tmp_path / "base", tmp_path / "adapter", model


@pytest.mark.parametrize("variant", ["qwen2-tied", "llama-all-biases-wide-heads", "qwen3-wide-heads", "mistral-plain"])
@pytest.mark.parametrize(
    "lora", [LORA, LoraConfig(rank=2, alpha=1.0, targets=("v_proj", "down_proj"), train_norms=False)]
)
def test_peft_loads_a_saved_adapter_with_equal_logits(tmp_path, variant, lora):
    write_tiny(tmp_path / "base", variant)
    model = load_tiny(tmp_path / "base", lora=lora)
    randomize_adapters(model)
    save_adapter(model, tmp_path / "adapter", base_path=str(tmp_path / "base"), lora=lora)
    base = plain_transformers(tmp_path / "base")
    without = transformers_logits(base, SEQUENCES)
    expected = transformers_logits(PeftModel.from_pretrained(base, tmp_path / "adapter").eval(), SEQUENCES)
    assert (expected - without).abs().max() > 0.05
    assert (decoder_logits(model, SEQUENCES) - expected).abs().max() < 1e-4


def test_loading_what_was_saved_gives_the_same_bits(saved):
    base, folder, model = saved
    again = load_tiny(base, lora=LORA, seed=99)
    load_adapter(again, folder)
    assert adapter_hash(again) == adapter_hash(model)
    assert norm_hash(again) == norm_hash(model)
    assert torch.equal(decoder_logits(again, SEQUENCES), decoder_logits(model, SEQUENCES))
    assert adapter_lora_config(folder) == LORA


def test_loading_writes_into_the_same_parameters(saved):
    base, folder, _ = saved
    again = load_tiny(base, lora=LORA)
    parameters = again.trainable_parameters()
    pointers = {name: parameter.data_ptr() for name, parameter in parameters.items()}
    load_adapter(again, folder)
    assert {name: parameter.data_ptr() for name, parameter in again.trainable_parameters().items()} == pointers


def test_an_adapter_made_by_peft_loads_here(tmp_path):
    write_tiny(tmp_path / "base", "llama-plain")
    base = plain_transformers(tmp_path / "base")
    theirs = get_peft_model(
        base, PeftLoraConfig(r=3, lora_alpha=9, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM")
    ).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    theirs.save_pretrained(tmp_path / "adapter")
    lora = adapter_lora_config(tmp_path / "adapter")
    assert lora == LoraConfig(rank=3, alpha=9.0, targets=("q_proj", "o_proj"), train_norms=False)
    model = load_tiny(tmp_path / "base", lora=lora)
    load_adapter(model, tmp_path / "adapter")
    assert (decoder_logits(model, SEQUENCES) - transformers_logits(theirs, SEQUENCES)).abs().max() < 1e-4


def test_config_has_what_peft_and_vllm_read(saved):
    base, folder, _ = saved
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["r"] == 4
    assert config["lora_alpha"] == 6
    assert isinstance(config["lora_alpha"], int)
    assert config["task_type"] == "CAUSAL_LM"
    assert config["base_model_name_or_path"] == str(base)
    assert set(config["target_modules"]) == set(LORA.targets)
    assert config["modules_to_save"] == ["input_layernorm", "post_attention_layernorm"]
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


def test_an_adapter_that_does_not_fit_is_refused_and_changes_nothing(saved):
    base, folder, _ = saved
    cases = {
        "another rank or scale": LORA.model_copy(update={"rank": 8}),
        "another rank or scale than the model": LORA.model_copy(update={"alpha": 12.0}),
        "down_proj.*has no place in the model": LORA.model_copy(update={"targets": ("v_proj",)}),
    }
    for message, lora in cases.items():
        model = load_tiny(base, lora=lora)
        before = adapter_hash(model), norm_hash(model)
        with pytest.raises(CheckpointError, match=message):
            load_adapter(model, folder)
        assert (adapter_hash(model), norm_hash(model)) == before


def test_a_damaged_adapter_is_named(saved):
    base, folder, _ = saved
    model = load_tiny(base, lora=LORA)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"

    save_file({key: value for key, value in tensors.items() if key != name}, file)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.lora_B\.weight is missing"):
        load_adapter(model, folder)
    save_file({**tensors, name: torch.zeros(3, 4)}, file)
    with pytest.raises(CheckpointError, match=r"up_proj\.lora_B\.weight does not fit.*shape \[3, 4\]"):
        load_adapter(model, folder)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors is truncated"):
        load_adapter(model, folder)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors does not exist"):
        load_adapter(model, folder)


@pytest.mark.parametrize("key", ["use_dora", "use_rslora"])
def test_other_kinds_of_adapter_are_refused_by_name(saved, key):
    base, folder, _ = saved
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: True}))
    with pytest.raises(CheckpointError, match=f"{key}=True"):
        load_adapter(load_tiny(base, lora=LORA), folder)
    with pytest.raises(CheckpointError, match=f"{key}=True"):
        adapter_lora_config(folder)

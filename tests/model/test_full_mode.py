"""Full mode: every weight learns, with the gradients of transformers' autograd, and is saved as a folder that transformers loads."""

import json

import pytest
import torch
import transformers
from tiny_models import (
    VARIANTS,
    decoder_logits,
    load_tiny,
    pack,
    random_tokens,
    transformers_logits,
    write_tiny,
)

from qerl.config.schema import QuantConfig
from qerl.errors import CheckpointError, ConfigError
from qerl.kernels.token_logprobs import token_logprobs
from qerl.model import model_files
from qerl.model.checkpoint import adapter_hash, base_hash, load_weights, norm_hash, save_model
from qerl.model.hashes import fingerprint
from qerl.model.model_files import model_tensors

# Without token 0, the padding: transformers gives its embedding no gradient.
SEQUENCES = [sequence.clamp(min=1) for sequence in random_tokens((17, 9, 26))]
MANY = ["qwen2-tied", "qwen2-untied-theta", "llama-all-biases-wide-heads", "qwen3-bias-tied"]


def weights_by_name(model, values):
    """Checkpoint name -> value for every parameter, cut as the checkpoint is; ``values`` maps a parameter to its value."""
    held = {id(tensor): values(tensor) for tensor in model.parameters()}
    named = {name: held[id(t)] for name, t in model_tensors(model).items() if id(t) in held}
    for layer, module in enumerate(model.layers):
        for shape in model.spec.groups():
            linear = getattr(module, shape.attribute)
            for name, part in zip(
                shape.part_names(layer), held[id(linear.trained_OI)].split(linear.sizes), strict=True
            ):
                named[f"model.{name}.weight"] = part
            if linear.bias_O is not None:
                for name, part in zip(
                    shape.part_names(layer), held[id(linear.bias_O)].split(linear.sizes), strict=True
                ):
                    named[f"model.{name}.bias"] = part
    return named


def loss_of(model, checkpointing="none"):
    """Sum of the log-probs of all next tokens, through the kernels that training uses."""
    tokens_T, context = pack(SEQUENCES)
    hidden_TD = model(tokens_T, context, checkpointing=checkpointing)
    starts = [0, 17, 26]
    keep = torch.tensor([i for i in range(52) if i + 1 not in (*starts, 52)])
    logprobs_N, _ = token_logprobs(hidden_TD[keep], model.head_weight, tokens_T[keep + 1], temperature=0.7, chunk=11)
    return -logprobs_N.sum()


def transformers_loss(model):
    total = 0
    for sequence in SEQUENCES:
        logits = model(input_ids=sequence[None]).logits[0, :-1] / 0.7
        total = total + torch.nn.functional.cross_entropy(logits, sequence[1:], reduction="sum")
    return total


@pytest.mark.parametrize("variant", MANY)
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_gradients_of_every_weight_are_those_of_transformers(tmp_path, variant, checkpointing):
    reference = write_tiny(tmp_path, variant)
    model = load_tiny(tmp_path, full=True)
    loss, expected = loss_of(model, checkpointing), transformers_loss(reference)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    ours = weights_by_name(model, lambda parameter: parameter.grad)
    theirs = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert gradient.abs().max() > 0, name
        assert (ours[name] - gradient).norm() <= 2e-5 * gradient.norm(), name


def test_everything_learns_in_full_mode(tmp_path):
    write_tiny(tmp_path, "qwen3-bias-tied")
    model = load_tiny(tmp_path, full=True)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert sum(p.numel() for p in model.trainable_parameters().values()) == sum(
        p.numel() for p in transformers.AutoModelForCausalLM.from_pretrained(tmp_path).parameters()
    )


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_a_saved_model_is_an_ordinary_folder(tmp_path, variant):
    write_tiny(tmp_path / "base", variant)
    (tmp_path / "base" / "tokenizer_config.json").write_text("{}")
    model = load_tiny(tmp_path / "base", full=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    save_model(model, tmp_path / "out", source=tmp_path / "base")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ours = decoder_logits(model, SEQUENCES)
    assert (ours - transformers_logits(again, SEQUENCES)).abs().max() < 1e-4
    assert torch.equal(ours, decoder_logits(load_tiny(tmp_path / "out", full=True), SEQUENCES))
    assert (tmp_path / "out" / "tokenizer_config.json").exists()


def test_shards_are_read_by_transformers_and_by_us(tmp_path, monkeypatch):
    write_tiny(tmp_path / "base")
    model = load_tiny(tmp_path / "base", full=True)
    monkeypatch.setattr(model_files, "SHARD_BYTES", 40_000)
    save_model(model, tmp_path / "out", source=tmp_path / "base")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert (transformers_logits(again, SEQUENCES) - decoder_logits(model, SEQUENCES)).abs().max() < 1e-4
    other = load_tiny(tmp_path / "out", full=True)
    assert adapter_hash(other) == adapter_hash(model)


def test_bfloat16_weights_come_back_to_the_bit_with_float32_norms(tmp_path):
    write_tiny(tmp_path / "base")
    model = load_tiny(tmp_path / "base", full=True, dtype=torch.bfloat16)
    with torch.no_grad():
        model.final_norm.mul_(1.0001)
    save_model(model, tmp_path / "out", source=tmp_path / "base")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    other = load_tiny(tmp_path / "base", full=True, dtype=torch.bfloat16)
    pointers = [parameter.data_ptr() for parameter in other.parameters()]
    assert (adapter_hash(other), norm_hash(other)) != (adapter_hash(model), norm_hash(model))
    load_weights(other, tmp_path / "out")
    assert (adapter_hash(other), norm_hash(other), base_hash(other)) == (
        adapter_hash(model),
        norm_hash(model),
        base_hash(model),
    )
    assert pointers == [parameter.data_ptr() for parameter in other.parameters()], "loaded in place"
    assert model_tensors(model)["model.norm.weight"].dtype == torch.float32


def test_weights_of_another_model_or_type_are_refused_and_change_nothing(tmp_path):
    write_tiny(tmp_path / "base")
    write_tiny(tmp_path / "wide", intermediate_size=128)
    model = load_tiny(tmp_path / "base", full=True)
    before = adapter_hash(model)
    with pytest.raises(CheckpointError, match="does not fit"):
        load_weights(model, tmp_path / "wide")
    save_model(
        load_tiny(tmp_path / "base", full=True, dtype=torch.bfloat16), tmp_path / "bf16", source=tmp_path / "base"
    )
    with pytest.raises(CheckpointError, match="another type"):
        load_weights(model, tmp_path / "bf16")
    assert adapter_hash(model) == before


def test_packed_weights_cannot_be_trained(tmp_path):
    write_tiny(tmp_path)
    with pytest.raises(ConfigError, match="packed weights cannot be trained"):
        load_tiny(tmp_path, full=True, quant=QuantConfig(format="nvfp4"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_fingerprint_sees_every_changed_word_and_every_swap(dtype):
    tensor = torch.arange(1, 104, dtype=torch.float32).to(dtype)
    before = int(fingerprint(tensor))
    for index in range(103):
        changed = tensor.clone()
        changed[index] += 16
        assert int(fingerprint(changed)) != before, index
    words = 8 // tensor.element_size()
    for other in range(words, 96, words):
        swapped = tensor.clone()
        swapped[:words], swapped[other : other + words] = tensor[other : other + words], tensor[:words]
        assert int(fingerprint(swapped)) != before, other


def test_a_fingerprint_is_the_sum_it_says(monkeypatch):
    from qerl.model import hashes

    monkeypatch.setattr(hashes, "CHUNK_WORDS", 3)
    tensor = torch.randn(21, generator=torch.Generator().manual_seed(0))
    data = tensor.numpy().tobytes() + bytes(4)
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    expected = sum((2 * i + 1) * word for i, word in enumerate(words)) % 2**64
    assert int(fingerprint(tensor)) % 2**64 == expected

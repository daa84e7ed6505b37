"""What is predicted to be kept for the backward pass against what autograd keeps, and against what the allocator hands out."""

import pytest
import torch
from memory_builders import configured
from tiny_models import load_tiny, random_tokens, randomize_adapters, write_tiny

from qerl.config.schema import LoraConfig
from qerl.memory.ledger import kept_values, micro_batch_tokens, predict
from qerl.model.aqn import NoiseState
from qerl.model.attention import PackedSequences

LENGTH, COUNT = 64, 4
TOKENS = LENGTH * COUNT


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, "llama-plain", max_position_embeddings=64, intermediate_size=160)
    return path


def kept_storages(model, call):
    """Distinct storages that the graph of one pass holds, weights and tables left out: bytes."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    own |= {buffer.untyped_storage().data_ptr() for buffer in model.buffers()}
    own |= {t.untyped_storage().data_ptr() for x in model.grouped_linears() for t in x.weight.tensors.values()}
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call().square().sum()
    return sum(
        tensor.untyped_storage().nbytes()
        for address, tensor in storages.items()
        if address not in own and tensor.is_floating_point()
    )


@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_kept_bytes_are_the_counted_values(folder, mode, checkpointing):
    lora = LoraConfig(rank=4) if mode == "lora" else None
    model = load_tiny(folder, lora=lora, full=mode == "full")
    if lora is not None:
        randomize_adapters(model)
    settings = ["lora.rank=4"] if mode == "lora" else ["train.mode=full", "quant.format=bf16"]
    config = configured(*settings, "model.dtype=float32", f"train.checkpointing={checkpointing}", "aqn.enabled=false")
    tokens = torch.cat(random_tokens((LENGTH,) * COUNT))
    context = PackedSequences(torch.arange(0, TOKENS + 1, LENGTH))

    def of_layers(count):
        """Bytes kept by a pass over the first layers of the model."""
        layers, model.layers = model.layers, model.layers[:count]
        try:
            return kept_storages(model, lambda: model(tokens, context, checkpointing=checkpointing))
        finally:
            model.layers = layers

    spec = model.spec
    kept = of_layers(3) - of_layers(2)
    if checkpointing == "full":
        assert kept == 4 * TOKENS * spec.hidden_size
        return
    # Beside the values: one number a norm and one a head (log-sum-exp), float32.
    expected = 4 * TOKENS * (kept_values(config, spec, "cpu") + 2 + spec.num_heads)
    assert kept == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_float32_stream_beside_bfloat16_is_counted(folder, checkpointing):
    tokens = torch.cat(random_tokens((LENGTH,) * COUNT))
    context = PackedSequences(torch.arange(0, TOKENS + 1, LENGTH))
    kept, counted = [], []
    for stream in ("compute", "float32"):
        model = load_tiny(folder, lora=LoraConfig(rank=4), dtype=torch.bfloat16, float32_stream=stream == "float32")
        layers, sizes = model.layers, []
        for count in (2, 3):
            model.layers = layers[:count]
            sizes.append(kept_storages(model, lambda model=model: model(tokens, context, checkpointing=checkpointing)))
        kept.append((sizes[1] - sizes[0]) // TOKENS)
        config = configured(
            "model.dtype=bfloat16", f"model.stream_dtype={stream}", f"train.checkpointing={checkpointing}"
        )
        ledger = predict(config, model.spec, device_type="cpu")
        counted.append(
            ledger.phases["backward"]["activations"] // (model.spec.num_layers * micro_batch_tokens(config, "cpu"))
        )
    assert (
        kept[1] - kept[0] == counted[1] - counted[0] == (2 if checkpointing == "full" else 4) * model.spec.hidden_size
    )


@pytest.mark.parametrize("variant", ["llama-plain", "qwen3-wide-heads"])
def test_heads_in_float16_are_counted(tmp_path, variant):
    """What is more and what is less than in bfloat16: outputs of attention, projections in float32 that head norms keep, and v's own memory."""
    write_tiny(tmp_path, variant, max_position_embeddings=64)
    tokens = torch.cat(random_tokens((LENGTH,) * COUNT))
    context, kept, counted = PackedSequences(torch.arange(0, TOKENS + 1, LENGTH)), [], []
    for half in (False, True):
        model = load_tiny(tmp_path, lora=LoraConfig(rank=4), dtype=torch.bfloat16, float16_attention=half)
        layers, sizes = model.layers, []
        for count in (2, 3):
            model.layers = layers[:count]
            sizes.append(kept_storages(model, lambda model=model: model(tokens, context)))
        kept.append((sizes[1] - sizes[0]) / TOKENS)
        config = configured("model.dtype=bfloat16", f"model.attention_dtype={'float16' if half else 'compute'}")
        counted.append(2 * kept_values(config, model.spec, "cpu"))
    assert kept[1] - kept[0] == pytest.approx(counted[1] - counted[0], abs=0.02 * counted[0])


def test_selective_checkpointing_keeps_less_and_needs_no_noise_kept(folder):
    model = load_tiny(folder, lora=LoraConfig(rank=4))
    noise = NoiseState(seed=0, rollout=1, stage=1, sigma=0.05, sites=("attn_norm", "mlp_norm")).materialize(model)
    tokens = torch.cat(random_tokens((LENGTH,) * COUNT))
    context = PackedSequences(torch.arange(0, TOKENS + 1, LENGTH))
    sizes = [
        kept_storages(model, lambda mode=mode: model(tokens, context, noise=noise, checkpointing=mode))
        for mode in ("none", "selective", "full")
    ]
    assert sizes[0] > 1.3 * sizes[1] > 1.3 * sizes[2]

"""A call's arguments decide what it computes, and no call leaves a trace on the model."""

import pytest
import torch
from tiny_models import decoder_logits, load_tiny, pack, random_tokens, randomize_adapters, write_tiny

from qerl.config.schema import LoraConfig, QuantConfig
from qerl.kernels.token_logprobs import token_logprobs
from qerl.model.aqn import NoiseState
from qerl.model.attention import PackedSequences, packed_positions

LORA = LoraConfig(rank=4, alpha=8.0)
SEQUENCES = random_tokens((9, 31, 2))


@pytest.fixture(params=["qwen2-tied", "qwen3-wide-heads"])
def folder(request, tmp_path):
    write_tiny(tmp_path, request.param)
    return tmp_path


def gradients(model, **call):
    tokens_T, context = pack(SEQUENCES)
    hidden = model(tokens_T, context, **call)
    logprobs, entropy = token_logprobs(hidden[:-1], model.head_weight, tokens_T[1:])
    (logprobs.sum() + 0.1 * entropy.sum()).backward()
    found = {name: parameter.grad for name, parameter in model.trainable_parameters().items()}
    model.zero_grad()
    return found


def test_positions_restart_with_each_sequence():
    cu_seqlens = torch.tensor([0, 3, 4, 6])
    assert packed_positions(cu_seqlens).tolist() == [0, 1, 2, 0, 0, 1]
    assert PackedSequences(cu_seqlens).positions_T.tolist() == [0, 1, 2, 0, 0, 1]


def test_packed_sequences_do_not_see_each_other(folder):
    model = load_tiny(folder)
    together = decoder_logits(model, SEQUENCES)
    alone = torch.cat([decoder_logits(model, [sequence]) for sequence in SEQUENCES])
    assert (together - alone).abs().max() < 2e-5
    other = [SEQUENCES[0], random_tokens((31,), seed=9)[0], SEQUENCES[2]]
    changed = decoder_logits(model, other)
    assert (changed[:9] - together[:9]).abs().max() < 2e-5
    assert (changed[40:] - together[40:]).abs().max() < 2e-5


def test_later_tokens_do_not_change_earlier_logits(folder):
    model, sequence = load_tiny(folder), SEQUENCES[1]
    assert (decoder_logits(model, [sequence[:12]]) - decoder_logits(model, [sequence])[:12]).abs().max() < 2e-5


@pytest.mark.parametrize("quant", [QuantConfig(format="bf16"), QuantConfig(dense_cache="off"), QuantConfig()])
@pytest.mark.parametrize(
    "recompute", [{"checkpointing": "selective"}, {"checkpointing": "full"}, {"checkpointing": "full", "offload": True}]
)
def test_checkpointing_gives_the_same_gradients(folder, quant, recompute):
    model = load_tiny(folder, lora=LORA, quant=quant)
    randomize_adapters(model)
    noise = NoiseState(
        seed=0, rollout=1, stage=1, sigma=0.05, sites=("attn_norm", "mlp_norm", "final_norm")
    ).materialize(model)
    kept, recomputed = gradients(model, noise=noise), gradients(model, noise=noise, **recompute)
    assert kept.keys() == recomputed.keys()
    for name, gradient in kept.items():
        assert gradient is not None, name
        assert gradient.abs().max() > 0, name
        assert torch.equal(gradient, recomputed[name]), name


def test_everything_that_trains_and_nothing_else_gets_a_gradient(folder):
    model = load_tiny(folder, lora=LORA)
    names = set(model.trainable_parameters())
    layers, groups = 3, 4
    assert len(names) == layers * (groups + 7 + 2)  # stacked A, B, norms
    assert not any(name.startswith(("embed", "lm_head", "final")) or "q_norm" in name for name in names)
    frozen = load_tiny(folder, lora=LORA.model_copy(update={"train_norms": False}))
    assert len(frozen.trainable_parameters()) == layers * (groups + 7)
    assert not load_tiny(folder).trainable_parameters()


def test_gradients_agree_with_finite_differences(folder):
    model = load_tiny(folder, lora=LORA)
    randomize_adapters(model)
    found = gradients(model)

    def objective():
        tokens_T, context = pack(SEQUENCES)
        with torch.no_grad():
            logprobs, entropy = token_logprobs(model(tokens_T, context)[:-1], model.head_weight, tokens_T[1:])
        return float(logprobs.double().sum() + 0.1 * entropy.double().sum())

    for name, parameter in model.trainable_parameters().items():
        direction = found[name] / found[name].norm()
        step = 1e-2
        with torch.no_grad():
            parameter.add_(step * direction)
            above = objective()
            parameter.sub_(2 * step * direction)
            below = objective()
            parameter.add_(step * direction)
        assert (above - below) / (2 * step) == pytest.approx(float(found[name].norm()), rel=0.02), name


def test_adapters_can_be_left_out(folder):
    plain, model = load_tiny(folder), load_tiny(folder, lora=LORA)
    expected = decoder_logits(plain, SEQUENCES)
    assert torch.equal(decoder_logits(model, SEQUENCES), expected), "fresh adapters change nothing"
    randomize_adapters(model)
    assert (decoder_logits(model, SEQUENCES) - expected).abs().max() > 0.1


def test_the_reference_policy_is_the_loaded_model_whatever_was_trained(folder):
    model = load_tiny(folder, lora=LORA, keep_reference_norms=True)
    initial = decoder_logits(model, SEQUENCES)
    randomize_adapters(model)
    trained = decoder_logits(model, SEQUENCES)
    assert torch.equal(decoder_logits(model, SEQUENCES, adapters=False, reference=True), initial)
    assert not torch.equal(decoder_logits(model, SEQUENCES, adapters=False), initial), "norms were trained too"
    assert torch.equal(decoder_logits(model, SEQUENCES), trained), "no call leaves a trace"


def test_a_group_returns_its_members_outputs(folder):
    model = load_tiny(folder)
    linear = model.layers[0].qkv
    x_TI = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    outputs = linear(x_TI)
    assert [output.shape[1] for output in outputs] == list(linear.sizes)
    start, stop = linear.rows_of("k_proj")
    assert torch.equal(outputs[1], linear.stacked(x_TI)[:, start:stop])
    assert [group.name for group in model.grouped_linears()][:2] == [
        "layers.0.self_attn.qkv_proj",
        "layers.0.self_attn.o_proj",
    ]

"""float32 logits against transformers, on tiny random checkpoints of every architecture and switch."""

import pytest
import torch
from tiny_models import VARIANTS, decoder_logits, load_tiny, random_tokens, transformers_logits, write_tiny

from qerl.errors import CheckpointError

LENGTHS = (1, 23, 7, 64)


@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_logits_equal_transformers(tmp_path, variant):
    reference = write_tiny(tmp_path, variant)
    sequences = random_tokens(LENGTHS)
    expected = transformers_logits(reference, sequences)
    assert expected.std() > 0.3, "logits too flat to tell anything"
    difference = (decoder_logits(load_tiny(tmp_path), sequences) - expected).abs().max()
    assert difference < 1e-4


@pytest.mark.parametrize("variant", ["qwen2-untied-theta", "llama-llama3-rope"])
def test_a_sharded_checkpoint_gives_the_same_logits(tmp_path, variant):
    reference = write_tiny(tmp_path, variant, shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    sequences = random_tokens((9, 30))
    expected = transformers_logits(reference, sequences)
    assert (decoder_logits(load_tiny(tmp_path), sequences) - expected).abs().max() < 1e-4


def test_scaled_rotations_differ_from_plain_ones(tmp_path):
    """Guards the parity test: at its lengths the scaling must matter."""
    sequences = random_tokens(LENGTHS)
    logits = []
    for name in ("llama-plain", "llama-llama3-rope", "llama-linear-rope"):
        write_tiny(tmp_path / name, name)
        logits.append(decoder_logits(load_tiny(tmp_path / name), sequences))
    assert (logits[0] - logits[1]).abs().max() > 1e-2
    assert (logits[0] - logits[2]).abs().max() > 1e-2


def test_bfloat16_logits_are_near_transformers(tmp_path):
    reference = write_tiny(tmp_path, "qwen3-wide-heads", dtype=torch.bfloat16)
    sequences = random_tokens((12, 40))
    ours = decoder_logits(load_tiny(tmp_path, dtype=torch.bfloat16), sequences)
    assert ours.dtype == torch.float32
    exact = transformers_logits(reference.float(), sequences)
    theirs = transformers_logits(reference.bfloat16(), sequences)
    # bfloat16 arithmetic costs both about the same; neither may be far from float32.
    assert (ours - exact).abs().mean() < 1.2 * (theirs - exact).abs().mean()


def test_the_decoder_stays_where_it_was_loaded(tmp_path):
    write_tiny(tmp_path)
    with pytest.raises(AssertionError, match="load_model"):
        load_tiny(tmp_path).to(torch.float64)


def test_an_unsupported_model_is_refused_before_its_weights_are_opened(tmp_path):
    write_tiny(tmp_path, "mistral-plain", sliding_window=16)
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(CheckpointError, match="sliding_window=16"):
        load_tiny(tmp_path)

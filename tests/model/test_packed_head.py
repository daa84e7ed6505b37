"""The LM head in its own format: tied and untied, cached and not, and the bytes that are predicted for it."""

import pytest
import torch
from tiny_models import decoder_logits, load_tiny, random_tokens, transformers_logits, write_tiny

from qerl.config.load import load_config
from qerl.config.schema import QuantConfig
from qerl.errors import FormatError
from qerl.formats import dequantize
from qerl.formats.fp8 import Fp8Format
from qerl.formats.tiles import COLUMNS, ROWS
from qerl.memory import measure_resident, predict
from qerl.model.checkpoint import base_hash
from qerl.model.spec import ModelSpec

SEQUENCES = random_tokens((14, 33))


@pytest.mark.parametrize("lm_head", ["fp8", "nvfp4"])
@pytest.mark.parametrize("variant", ["qwen2-tied", "llama-plain"])
@pytest.mark.parametrize("dense_cache", ["on", "off"])
def test_logits_are_those_of_the_rounded_head_and_the_embedding_stays(tmp_path, lm_head, variant, dense_cache):
    reference = write_tiny(tmp_path, variant)
    plain = load_tiny(tmp_path)
    model = load_tiny(tmp_path, quant=QuantConfig(format="bf16", lm_head=lm_head, dense_cache=dense_cache))
    assert model.packed_head.format == lm_head
    assert isinstance(model.head_weight, torch.Tensor) == (dense_cache == "on")
    assert torch.equal(model.embed_tokens, plain.embed_tokens)
    exact = transformers_logits(reference, SEQUENCES)
    if variant == "qwen2-tied":
        reference.lm_head.weight = torch.nn.Parameter(reference.lm_head.weight.detach().clone())
    reference.lm_head.weight.data.copy_(dequantize(model.packed_head))
    expected = transformers_logits(reference, SEQUENCES)
    assert (decoder_logits(model, SEQUENCES) - expected).abs().max() < 1e-4
    assert (exact - expected).abs().max() > 0.01
    assert len({base_hash(plain), base_hash(model)}) == 2


@pytest.mark.parametrize("variant", ["qwen2-tied", "llama-plain"])
def test_an_fp8_head_in_tiles_is_the_same_model(tmp_path, monkeypatch, variant):
    """As a device of `TILED_ON` holds it: same logits, same hash, and the bytes of a ledger that knows of no order, but for what fills whole tiles."""
    write_tiny(tmp_path, variant)
    config = load_config(None, ["quant.format=bf16", "quant.lm_head=fp8", "model.dtype=float32", "model.path=demo"])
    natural = load_tiny(tmp_path, quant=config.quant)
    monkeypatch.setattr(Fp8Format, "for_device", Fp8Format.tiled)
    tiled = load_tiny(tmp_path, quant=config.quant)
    assert (natural.packed_head.order, tiled.packed_head.order) == ("natural", "tiles")
    assert torch.equal(decoder_logits(tiled, SEQUENCES), decoder_logits(natural, SEQUENCES))
    assert base_hash(tiled) == base_hash(natural)
    assert tiled.state_dict().keys() == natural.state_dict().keys()
    predicted = predict(config, natural.spec, device_type="cpu").owners()["embeddings"]
    vocabulary, width = natural.packed_head.shape
    filled = -(-vocabulary // ROWS) * ROWS * -(-width // COLUMNS) * COLUMNS - vocabulary * width
    assert measure_resident(tiled)["embeddings"] == predicted + filled


def test_a_searched_head_is_closer_and_fp8_is_always_rounded_to_nearest(tmp_path):
    write_tiny(tmp_path, "llama-plain")
    plain = load_tiny(tmp_path).lm_head
    errors = {}
    for method in ("rtn", "mse"):
        for lm_head in ("nvfp4", "fp8"):
            model = load_tiny(tmp_path, quant=QuantConfig(format="bf16", lm_head=lm_head, method=method))
            errors[lm_head, method] = float((dequantize(model.packed_head) - plain).norm())
    assert errors["nvfp4", "mse"] < 0.9 * errors["nvfp4", "rtn"]
    assert errors["fp8", "mse"] == errors["fp8", "rtn"] < 0.4 * errors["nvfp4", "rtn"]


def test_a_head_with_nan_is_named(tmp_path):
    model = write_tiny(tmp_path, "qwen2-tied")
    model.model.embed_tokens.weight.data[3, 4] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(FormatError, match=r"embed_tokens.*NaN"):
        load_tiny(tmp_path, quant=QuantConfig(format="bf16", lm_head="fp8"))


@pytest.mark.parametrize("variant", ["qwen2-tied", "llama-plain"])
@pytest.mark.parametrize(
    "quant",
    [
        {"format": "bf16"},
        {"format": "nvfp4", "lm_head": "fp8"},
        {"format": "mxfp4", "lm_head": "nvfp4", "dense_cache": "off"},
        {"format": "nf4", "double_quant": True},
        {"format": "bf16", "lm_head": "nvfp4"},
        {"format": "nf4", "overrides": '{"layers.1.*": bf16, "*.down_proj": mxfp4}'},
    ],
    ids=str,
)
def test_predicted_bytes_are_the_bytes_held(tmp_path, variant, quant):
    write_tiny(tmp_path, variant)
    settings = [f"quant.{key}={str(value).lower()}" for key, value in quant.items()]
    config = load_config(None, [*settings, "model.dtype=float32", "model.path=demo"])
    predicted = predict(config, ModelSpec.from_folder(tmp_path), device_type="cpu").owners()
    measured = measure_resident(load_tiny(tmp_path, quant=config.quant))
    for owner in ("base_weights", "dense_cache", "embeddings"):
        assert predicted[owner] == measured[owner], owner

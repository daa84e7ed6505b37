"""Draws that a pass holds for all its norms, and those that each norm makes for itself."""

import pytest
import torch
from tiny_models import load_tiny, write_tiny

from qerl.kernels.rms_norm import KeyedNoise, TableNoise
from qerl.model.aqn import NoiseState, noise
from qerl.model.attention import PackedSequences


@pytest.mark.parametrize("scope", ["group", "response"])
@pytest.mark.parametrize(
    ("kind", "sites"), [("qwen2-tied", ("attn_norm", "final_norm")), ("qwen3-wide-heads", ("qk_norm", "mlp_norm"))]
)
@pytest.mark.parametrize("magnitude", ["absolute", "relative"])
def test_a_pass_draws_for_all_norms_of_a_width_at_once(tmp_path, monkeypatch, scope, kind, sites, magnitude):
    write_tiny(tmp_path, kind)
    model = load_tiny(tmp_path)
    context = PackedSequences(
        torch.tensor([0, 9, 23, 30]), sample_keys_S=torch.tensor([0, 1, 5]), prompt_lengths_S=torch.tensor([4, 6, 3])
    )
    settings = {"seed": 3, "rollout": 5, "stage": 1, "sigma": 0.2, "group_size": 2}
    drawn = NoiseState(sites=sites, scope=scope, magnitude=magnitude, **settings).materialize(model)
    seen = drawn.for_pass(context)
    found = {place: seen.of_norm(*place) for place in drawn.places()}
    assert all(isinstance(record, TableNoise) for record in found.values())
    held = {record.z_RD.untyped_storage().data_ptr() for record in found.values()}
    assert len(held) == len(set(drawn.widths.values()))
    monkeypatch.setattr(noise, "PASS_TABLE_BYTES", 0)
    apart = drawn.for_pass(context)
    for place, record in found.items():
        own = apart.of_norm(*place)
        assert isinstance(own, KeyedNoise)
        torch.testing.assert_close(record.z(), own.z(), rtol=1e-6, atol=1e-7)

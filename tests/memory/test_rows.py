"""Rows of the decode batch and the noise kept for them: by hand, and as the engine makes them."""

import pytest
import torch
from memory_builders import GRPO_STEP, configured, qwen
from tiny_models import load_tiny, write_tiny

from qerl.memory import predict
from qerl.memory.rows import buckets_for, decode_rows, table_bytes
from qerl.model.aqn import NoiseState
from qerl.rollout.row_noise import DecodeNoise, fits_tables

WIDTH = 28 * 2 * 3584
"""Channels of all norms of a 7B."""


@pytest.mark.parametrize(
    ("slots", "rows", "tables"), [(8, 8, True), (33, 48, True), (64, 64, True), (65, 80, False), (512, 512, False)]
)
def test_a_gpus_tables_have_the_rows_of_the_batch_and_none_beyond_64(slots, rows, tables):
    config = configured(*GRPO_STEP, "aqn.scope=response", f"rollout.max_num_seqs={slots}")
    without = configured(*GRPO_STEP, f"rollout.max_num_seqs={slots}")
    assert decode_rows(config, "cuda") == buckets_for(slots)[-1] == rows
    kept, none = (predict(one, qwen("7b"), device_type="cuda") for one in (config, without))
    size = 4 * rows * WIDTH if tables else 0
    assert kept.phases["rollout"]["noise"] == kept.phases["optimizer"].get("noise", 0) == size
    # The logits of a captured step have its rows, too.
    assert kept.phases["rollout"]["working"] == none.phases["rollout"]["working"] >= 4 * rows * 152064


def test_steps_of_unchanging_shapes_have_as_many_rows_as_are_decoded_at_once():
    config = configured(*GRPO_STEP, "aqn.scope=group", "rollout.max_num_seqs=33", "rollout.static_shapes=true")
    assert table_bytes(config, qwen("7b"), "cuda") == 4 * 33 * WIDTH


def test_a_cpus_tables_have_any_number_of_rows_up_to_2_gib():
    def kept(slots):
        return table_bytes(configured("aqn.scope=response", f"rollout.max_num_seqs={slots}"), qwen("7b"), "cpu")

    most = (2 << 30) // (4 * WIDTH)
    assert kept(most) == 4 * most * WIDTH and kept(most + 1) == 0


@pytest.mark.parametrize("scope", ["group", "response"])
@pytest.mark.parametrize("slots", [3, 33, 64, 65])
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_tables_are_those_that_the_engine_would_make(tmp_path, scope, slots, device_type):
    write_tiny(tmp_path, "qwen2-tied")
    model = load_tiny(tmp_path)
    config = configured(f"aqn.scope={scope}", f"rollout.max_num_seqs={slots}")
    sites = config.aqn.sites
    noise = NoiseState(seed=0, rollout=0, stage=0, sigma=0.1, sites=sites, scope=scope, group_size=8).materialize(model)
    rows = buckets_for(slots)[-1] if device_type == "cuda" else slots
    made = 0
    if fits_tables(noise, rows, torch.device(device_type)):
        made = sum(table.nbytes for table in DecodeNoise(noise, rows, torch.device("cpu")).tables.values())
    assert table_bytes(config, model.spec, device_type) == made

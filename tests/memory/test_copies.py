"""Where a GPU keeps dequantized weights beside the packed ones (`quant.dense_cache: auto`)."""

import pytest
from memory_builders import budget, configured, qwen

from qerl import memory
from qerl.units import GB


@pytest.mark.parametrize(
    ("size", "gigabytes", "settings", "choice"),
    [
        ("0.5b", 132, (), "on"),
        ("0.5b", 14.4, (), "on"),
        ("0.5b", 14.2, (), "off"),
        ("1.5b", 132, (), "on"),
        ("1.5b", 132, ("model.dtype=float32",), "off"),
        ("1.5b", 132, ("quant.dense_cache=off",), "off"),
        ("3b", 132, (), "off"),
        ("3b", 132, ("quant.dense_cache=on",), "on"),
        ("7b", 132, (), "auto"),
        ("0.5b", None, (), "off"),
        ("0.5b", 132, ("model.dtype=float32",), "off"),
        ("0.5b", 132, ("quant.dense_cache=off",), "off"),
        ("7b", 24, ("quant.dense_cache=on",), "on"),
        ("0.5b", 132, ("quant.format=bf16",), "auto"),
    ],
)
def test_weights_are_kept_dequantized_where_that_is_a_small_share_of_a_gpu(size, gigabytes, settings, choice):
    """2 bytes a number of weights below 10 million: .72 GB of a 0.5B model, .31 of a 1.5B and .68 of a 3B (q k v and o), none of a 7B; by itself
    up to a 1.5B, and at most a twentieth of the budget."""
    spec, bound = qwen(size), None if gigabytes is None else budget(gigabytes)
    config = configured("rollout.prompts_per_step=4", *settings)
    chosen = memory.resolve(config, spec, bound, device_type="cuda")
    assert chosen.quant.dense_cache == choice
    held = memory.predict(chosen, spec, device_type="cuda").resident["dense_cache"]
    sizes = [group.out_features * group.in_features for group in spec.groups()]
    small = sum(size for size in sizes if size < 10_000_000) * spec.num_layers
    assert held == (2 * small if choice == "on" else 0)
    assert memory.resolve(config, spec, bound, device_type="cpu").quant.dense_cache == config.quant.dense_cache


@pytest.mark.parametrize("gigabytes", [None, 14.2, 14.4, 132])
@pytest.mark.parametrize("size", ["0.5b", "1.5b", "3b", "7b"])
@pytest.mark.parametrize("asked", ["auto", "on", "off"])
@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_a_session_without_a_plan_keeps_the_copies_that_training_keeps(gigabytes, size, asked, device_type):
    """Where the plan of training has room for all else, so that copies take nothing from it."""
    spec, config = qwen(size), configured("rollout.prompts_per_step=4", f"quant.dense_cache={asked}")
    room = None if gigabytes is None else budget(gigabytes)
    planned = memory.resolve(config, spec, room, device_type=device_type)
    settled = memory.settle_copies(config, spec, room and room.size, device_type=device_type)
    assert settled.quant == planned.quant
    assert settled.model_copy(update={"quant": config.quant}) == config, "nothing else changes"


@pytest.mark.parametrize(("gigabytes", "choice"), [(6.2, "on"), (6.1, "off")])
def test_copies_of_a_model_without_a_run_are_at_most_a_twentieth(gigabytes, choice):
    """.308 GB: q k v and o of a 1.5B, 2,048 x 1,536 and 1,536 x 1,536 in 28 layers."""
    settled = memory.settle_copies(configured(), qwen("1.5b"), budget(gigabytes).size, device_type="cuda")
    assert settled.quant.dense_cache == choice
    assert (
        memory.predict(configured("quant.dense_cache=on"), qwen("1.5b"), device_type="cuda").resident["dense_cache"]
        == 2 * 28 * (2048 + 1536) * 1536
    )


def test_copies_of_weights_make_nothing_else_smaller():
    """Where the plan just fits, they are left out, whatever their share."""
    settings = ("rollout.prompts_per_step=8", "train.checkpointing=none", "train.token_budget=65536")
    spec, config = qwen("0.5b"), configured(*settings)
    with_copies, without = (
        memory.predict(configured(*settings, f"quant.dense_cache={choice}"), spec, device_type="cuda").peak / GB
        for choice in ("on", "off")
    )
    assert with_copies - without == pytest.approx(0.7157, abs=1e-4) and with_copies > 20
    for gigabytes, choice in ((with_copies + 0.01, "on"), (with_copies - 0.01, "off"), (without - 0.01, "off")):
        assert memory.resolve(config, spec, budget(gigabytes), device_type="cuda").quant.dense_cache == choice

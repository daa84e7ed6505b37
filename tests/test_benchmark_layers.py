"""The benchmark of decoder layers in toy shapes, and what kernels are by their names."""

import importlib
import json
import statistics
from pathlib import Path

import pytest
from cli_calls import bench

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def module(monkeypatch):
    """Imports a file of benchmarks/."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"benchmarks.{name}")


@pytest.mark.parametrize(
    ("kernel", "layers", "captured"),
    [
        (
            "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t> >",
            "attention",
            "attention",
        ),
        (
            "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4, false, false, cutlass::bfloat16_t> >",
            "attention",
            "attention",
        ),
        ("void flash::flash_bwd_convert_dq_kernel<cutlass::bfloat16_t>", "attention", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention)", "attention", "attention"),
        (
            "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>",
            "products",
            "linear",
        ),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNN", "products", "linear"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "products", "linear"),
        ("dequantize_kernel", "dequantize", "linear"),
        ("middle", "products", "linear"),
        ("attend", "other", "attention"),
    ],
)
def test_kernels_are_told_apart_by_name(module, kernel, layers, captured):
    """FlashAttention's kernels have the number types of cutlass in their names, and are no products."""
    assert module("layers").class_of(kernel) == layers
    assert module("captured").class_of(kernel) == captured


def test_layers_are_timed_by_format_and_tokens_in_toy_shapes(tmp_path):
    out = tmp_path / "layers.json"
    options = ["--tiny", "--layers", "3", "--shapes", "8x10,3x12/none", "--formats", "bf16,nvfp4,nvfp4+kept"]
    bench("layers", *options, "--out", out)
    content = json.loads(out.read_text())
    rows = content["rows"]
    # Eight answers share their prompt of 4, three do not.
    assert {name: row["tokens"] for name, row in rows.items()} == {
        f"32B {name} {shape}": tokens
        for name in ("bf16", "nvfp4", "nvfp4+kept")
        for shape, tokens in (("8x10", 84), ("3x12/none", 48))
    }
    assert {row["checkpointing"] for name, row in rows.items() if name.endswith("/none")} == {"none"}
    assert rows["32B nvfp4 8x10"]["checkpointing"] == "full"
    assert content["over_bf16"].keys() == {name for name in rows if "nvfp4" in name}
    for name, row in rows.items():
        every = row["all_layers"]
        assert every["forward"]["ms"] == statistics.median(every["forward"]["all"]) > 0, name
        # The toy has two layers, one less than were timed.
        assert row["whole_model_ms"]["backward"] == pytest.approx(every["backward"]["ms"] - row["layer_ms"]["backward"])

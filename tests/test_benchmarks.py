"""Benchmarks that run without a GPU in toy shapes, and the verb that starts them."""

import argparse
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli_calls import bench, qerl

ROOT = Path(__file__).resolve().parents[1]


def test_the_benchmark_of_linear_layers_checks_and_times_each_kernel(tmp_path):
    heads_of = ("bf16", "fp8", "fp8+natural", "fp8+tiles", "fp8+dense", "nvfp4")
    options = ["--tiny", "--head-formats", *heads_of, "--out", str(tmp_path / "kernels.json")]
    bench("kernels", *options)
    rows = json.loads((tmp_path / "kernels.json").read_text())["rows"]
    heads = [row for row in rows if "head" in row]
    assert [row["rows"] for row in heads] == [1, 5]
    assert all(row[fmt]["floor_us"] > 0 and row[fmt]["us"] > 0 for row in heads for fmt in heads_of)
    linears = [row for row in rows if "head" not in row]
    assert [(row["rank"], row["rows"]) for row in linears] == [(32, 1), (32, 5), (16, 1)]
    for row in linears:
        times = [row[key] for key in ("reference base", "reference lora", "bf16 base", "bf16 lora")]
        assert all(0 < entry["us_p20"] <= entry["us"] <= entry["us_p80"] for entry in times)
        assert row["floor_us"] > 0


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.kernels")


def test_cells_of_linear_layers_are_named_one_by_one(kernels):
    parse = kernels.parse_cells
    assert parse("7B/32/1,64/mxfp4,nf4+kept") == kernels.Cells("7B", 32, (1, 64), ("mxfp4", "nf4+kept"), (), (1, 64))
    assert parse("0.5B/0/8/nvfp4/humming").peers == ("humming",)
    assert parse("3B/16/8").formats == ("nvfp4",)
    assert [str(parse(text)) for text in ("7B/32/8/nf4", "7B/8/1/nvfp4/bitsandbytes")] == [
        "7B/32/8/nf4",
        "7B/8/1/nvfp4/bitsandbytes",
    ]
    for wrong in (
        "7B/32",
        "7B/x/8",
        "7B/32/",
        "7B/32/0",
        "8B/32/8",
        "7B/32/8/fp3",
        "7B/32/8/nf4/marlin",
        "7B/32/8/a/b/c",
    ):
        with pytest.raises(argparse.ArgumentTypeError):
            parse(wrong)


def test_cells_that_fail_are_in_the_file_and_the_others_are_measured(kernels, tmp_path, monkeypatch):
    torch.manual_seed(0)
    out = tmp_path / "cells.json"
    cells = kernels.Bench(torch.device("cpu"), 60.0, ["reference"], ("nvfp4", "nf4"), (), out)
    whole = kernels.packed

    def wrong(kernel, name):
        product = whole(kernel, name)
        return lambda *given: product(*given) * (1.01 if name == "mxfp4" else 1)

    monkeypatch.setattr(kernels, "packed", wrong)
    for text in ("7B/32/3/nf4", "7B/32/3/mxfp4", "7B/0/2/nvfp4,nf4"):
        cells.measure(kernels.parse_cells(text))
    found = json.loads(out.read_text())
    assert [(row["rank"], row["rows"]) for row in found["rows"]] == [(32, 3), (0, 2)]
    assert {"reference nf4 lora", "bf16 lora"} <= found["rows"][0].keys()
    assert {"reference base", "reference nf4 base"} <= found["rows"][1].keys()
    assert [entry["cells"] for entry in found["failed"]] == ["7B/32/3/mxfp4"]
    error = float(found["failed"][0]["error"].rpartition("error ")[2])
    assert error == pytest.approx(0.01, abs=kernels.LARGEST_ERROR), "a hundredth, and rounding"


@pytest.mark.parametrize(
    ("name", "said"), [("marlin", "unknown peer 'marlin'"), ("humming", "pip install humming-kernels")]
)
def test_a_library_that_is_not_there_ends_the_benchmark_before_any_figure(name, said):
    if importlib.util.find_spec(name):
        pytest.skip("it is installed")
    command = [sys.executable, "benchmarks/kernels.py", "--tiny", "--peers", name]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1 and result.stdout == ""
    assert said in result.stderr


def test_the_rollout_benchmark_runs_in_toy_shapes(tmp_path):
    out = tmp_path / "rollout.json"
    options = [
        "--tiny",
        "--formats",
        "nvfp4,bf16,nvfp4/nvfp4",
        "--noise",
        "off,response",
        "--noise-at",
        "2",
        "--sequences",
        "3",
        "--calls",
        "2",
        "--realistic",
    ]
    bench("rollout", *options, "--out", out)
    content = json.loads(out.read_text())
    timed = [cell for cell in content["cells"] if "ms_per_step" in cell]
    assert [(cell["format"], cell["head"], cell["noise"], cell["sequences"]) for cell in timed] == [
        ("nvfp4", "bf16", "off", 3),
        ("nvfp4", "bf16", "response", 2),
        ("bf16", "bf16", "off", 3),
        ("nvfp4", "nvfp4", "off", 3),
    ]
    # As a session on the CPU keeps them; of what is not packed there are none.
    assert [cell["copies"] for cell in timed] == [True, True, False, True]
    assert all(0 < cell["of_floor"] < 1 for cell in timed)
    assert all(cell["ms_min_max"][0] <= cell["ms_per_step"] <= cell["ms_min_max"][1] for cell in timed)
    # On the CPU the host looks at every token; a round is between two looks.
    assert all(cell["rounds"]["count"] == 2 * (192 - 1) for cell in timed)
    assert all(0 < cell["rounds"]["ms_p20"] <= cell["rounds"]["ms"] <= cell["rounds"]["ms_p80"] for cell in timed)
    assert all(len(cell["rounds_ms"]) == cell["rounds"]["count"] for cell in timed)
    assert all(
        min(cell["rounds_ms"]) <= cell["rounds"]["ms"] * 1.001 <= 1.002 * max(cell["rounds_ms"]) for cell in timed
    )
    realistic = [cell["realistic"] for cell in content["cells"] if "realistic" in cell]
    assert len(realistic) == 4
    assert realistic[0]["longest"] > 2 * realistic[0]["mean_length"]
    assert "an earlier run" in content["anchors"]["source"]


def test_answers_on_fewer_rows_are_refilled_put_back_and_computed_in_parts(tmp_path):
    """24 answers of up to 100 tokens to prompts of 60 on 8 rows: with room for all, and for five rows of one page."""
    out = tmp_path / "rollout.json"
    options = ["--tiny", "--sequences", "", "--calls", "3", "--realistic", "--rows", "8", "--prompt", "60"]
    # A page of 64 tokens is 16,384 bytes in these shapes.
    bench("rollout", *options, "--chunk", "16", "--kv-gb", "auto,1.4e-4", "--out", out)
    roomy, tight = (cell["realistic"] for cell in json.loads(out.read_text())["cells"])
    assert (roomy["rows"], roomy["prompt_tokens"], roomy["chunk_tokens"], roomy["kv_gb"]) == (8, 60, 16, None)
    for cell in (roomy, tight):
        least, most = cell["warm_tokens_per_second_min_max"]
        assert sorted(stats["tokens_per_second"] for stats in cell["calls"][1:]) == [least, most]
        assert [stats["refills"] > 0 and stats["prefill_chunks"] > 0 for stats in cell["calls"]] == [True] * 3
    for stats in roomy["calls"]:
        assert (stats["preemptions"], stats["prefill_tokens_again"]) == (0, 0)
        assert stats["prefill_tokens"] == 3 * 59
    for stats in tight["calls"]:
        assert stats["preemptions"] > 0
        assert stats["prefill_tokens"] - stats["prefill_tokens_again"] == 3 * 59


@pytest.fixture
def module(monkeypatch):
    """Imports a file of benchmarks/."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def test_a_command_is_recorded_without_paths_of_the_machine(module):
    stored = module("stored")
    given = [
        f"{ROOT}/benchmarks/step.py",
        "--out",
        "/jobs/one/x.json",
        "--model",
        "/models/M",
        "--add",
        "/jobs/two/y.json",
    ]
    given += ["--sequences", "", "run.dir=/jobs/z", f"--config={ROOT}/configs/demo.yaml", "--out=/a/b.json", "a=b=c"]
    assert stored.command(given) == (
        "python benchmarks/step.py --out results/x.json --model M --add results/y.json "
        "--sequences '' run.dir=z --config=configs/demo.yaml --out=results/b.json a=b=c"
    )


def test_the_rollout_benchmark_needs_no_file():
    printed = bench("rollout", "--tiny", "--sequences", "2,3", "--calls", "1", "--bare")
    found = re.findall(r"7B nvfp4 +head bf16 off +(\d+) sequences +([\d.]+) ms", printed)
    assert [sequences for sequences, _ in found] == ["2", "3"]
    assert all(float(ms) > 0 for _, ms in found)


def test_steps_are_timed_by_context_and_rank_in_toy_shapes(tmp_path):
    out = tmp_path / "curves.json"
    bench("curves", "--tiny", "--out", out)
    cells = json.loads(out.read_text())["cells"]
    assert [(cell["rank"], cell["rows"], cell["context"]) for cell in cells] == [
        (32, 3, 20),
        (32, 3, 70),
        (4, 1, 112),
        (4, 3, 112),
        (8, 1, 112),
        (8, 3, 112),
    ]
    short, long, narrow, _, wide, _ = (cell["floor_ms"] for cell in cells)
    assert short < long and narrow < wide, "floors have the cache and the adapters in them"
    assert all(cell["ms_per_step"] > cell["floor_ms"] for cell in cells)


def test_greedy_answers_leave_those_of_transformers_in_bfloat16_only(tmp_path):
    out = tmp_path / "divergence.json"
    bench("divergence", "--prompts", "16", "--answer", "24", "--device", "cpu", "--out", out)
    rows = json.loads(out.read_text())["rows"]
    assert [(row["format"], row["dtype"]) for row in rows] == [
        (name, dtype) for dtype in ("bfloat16", "float32") for name in ("bf16", "nvfp4")
    ]
    for rough, exact in zip(rows[:2], rows[2:], strict=True):
        assert exact["answers_that_diverge"] == 0
        assert exact["tokens"] > 100
        # Wilson's interval of none in n: from 0 to z^2 / (n + z^2).
        low, high = exact["divergences_per_1000_tokens_interval"]
        assert low == 0 and high == pytest.approx(1e3 * 1.959964**2 / (exact["tokens"] + 1.959964**2))
        assert rough["divergences_per_1000_tokens"] < 50
        low, high = rough["divergences_per_1000_tokens_interval"]
        assert low <= rough["divergences_per_1000_tokens"] < high
        assert (rough["gap_largest"] or 0) < 0.2, "only nearly equal tokens change places"


def test_rounding_of_keys_and_values_is_compared_by_format(tmp_path):
    out = tmp_path / "kv_formats.json"
    bench("kv_formats", "demo", "--out", out)
    kl = {row["format"]: row["kl"] for row in json.loads(out.read_text())["rows"]}
    assert 0 < kl["bfloat16"] < kl["fp8_values"] < kl["fp8"]


def test_small_adapters_are_lost_where_a_product_is_rounded_before_they_are_added(tmp_path):
    out = tmp_path / "young_adapters.json"
    bench("young_adapters", "--out", out, "demo", "--sizes", "1e-5", "1e-3", "1")
    small, middle, large = json.loads(out.read_text())["rows"]
    assert all(abs(row[f"share_{way}"] - 1) < 0.1 for row in (small, large) for way in ("sum", "apart"))
    assert small["share_rounded"] < 0.2 and large["share_rounded"] > 0.9
    assert middle["effect_sum"] > 0 and 0 < small["between_mean_abs_dp"] < small["between_mean_abs_dlogp"]
    bench("young_adapters", "--out", out, "--products", "--device", "cpu", "--rows", "20")
    rows = json.loads(out.read_text())["rows"]
    assert [(row["rows"], row["outputs"]) for row in rows][:2] == [(20, 960), (20, 3072)]
    # A CPU's products round once, or the sum before what is added.
    assert all(min(abs(row["share"]), abs(row["share"] - 1)) < 0.15 for row in rows)


def test_a_benchmark_that_does_not_exist_is_refused_with_the_nearest_name():
    result = qerl("bench", "stepp")
    assert result.exit_code == 2
    assert "Did you mean step?" in result.stderr


def test_what_benchmarks_share_is_not_offered_as_one():
    result = qerl("bench", "synthetic")
    assert result.exit_code == 2
    offered = result.stderr.split("expected one of")[1].split(".")[0]
    assert "kernels" in offered and "rollout" in offered and "synthetic" not in offered and "timing" not in offered


@pytest.mark.parametrize("call", [["benchmarks/quantize_memory.py"], ["-m", "qerl", "bench", "quantize_memory"]])
def test_a_benchmark_hides_no_package_of_the_name_of_another(call, tmp_path):
    """bitsandbytes and transformers look for a package `kernels`, and there is a benchmark of that name."""
    (tmp_path / "kernels.py").touch()
    at_the_end = 'import atexit, importlib.util as u\natexit.register(lambda: print(u.find_spec("kernels").origin))\n'
    (tmp_path / "sitecustomize.py").write_text(at_the_end)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, *call, "--help"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("usage: quantize_memory.py")
    assert result.stdout.splitlines()[-1] == str(tmp_path / "kernels.py")


@pytest.mark.parametrize(
    "path",
    [path for path in (ROOT / "benchmarks").glob("*.py") if '"__main__"' in path.read_text()],
    ids=lambda path: path.stem,
)
def test_every_benchmark_takes_its_folder_off_the_path_before_it_imports_anything(path):
    before = path.read_text().partition("    sys.path[0] = str(Path(__file__).resolve().parents[1])\n")[0]
    assert before.endswith('if __name__ == "__main__" and not __package__:\n')
    others = set(re.findall(r"^(?:import|from) (\w+)", before, re.MULTILINE)) - sys.stdlib_module_names
    assert not others

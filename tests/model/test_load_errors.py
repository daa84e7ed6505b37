"""Checkpoints that cannot be used: the error names the file and the tensor."""

import json
import traceback

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import load_tiny, write_tiny

from qerl.config.schema import QuantConfig
from qerl.errors import CheckpointError, FormatError

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path):
    write_tiny(tmp_path)
    return tmp_path


def change(folder, **tensors):
    """Replace tensors of the single file; None removes one."""
    file = folder / "model.safetensors"
    content = {**load_file(file), **tensors}
    save_file({name: tensor for name, tensor in content.items() if tensor is not None}, file)


@pytest.mark.parametrize("keep", [0.5, 0.01])
def test_a_truncated_file(folder, keep):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or not a safetensors file") as caught:
        load_tiny(folder)
    assert "SafetensorError" not in "".join(traceback.format_exception(caught.value)), "no chain of foreign errors"


def test_a_missing_tensor(folder):
    change(folder, **{UP: None})
    with pytest.raises(CheckpointError, match=rf"tensor {UP} is missing .*shape \[112, 64\]"):
        load_tiny(folder)


def test_a_shape_that_contradicts_the_config(folder):
    change(folder, **{UP: torch.zeros(100, 64)})
    with pytest.raises(
        CheckpointError, match=rf"safetensors: tensor {UP} does not fit config.json; got shape \[100, 64\]"
    ):
        load_tiny(folder)


def test_a_tensor_that_the_architecture_does_not_have(folder):
    change(folder, **{"model.layers.0.self_attn.o_proj.bias": torch.zeros(64)})
    with pytest.raises(CheckpointError, match=r"does not have; got model\.layers\.0\.self_attn\.o_proj\.bias"):
        load_tiny(folder)
    change(folder, **{"model.layers.0.self_attn.o_proj.bias": None, "lm_head.bias": torch.zeros(96)})
    with pytest.raises(CheckpointError, match=r"lm_head\.bias"):
        load_tiny(folder)


def test_harmless_extra_tensors_are_ignored(folder):
    """A tied head that is stored all the same, and rotation tables that old writers kept."""
    tied = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    tables = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(3)}
    change(folder, **{"lm_head.weight": tied, **tables})
    assert load_tiny(folder).lm_head is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "name",
    [UP, "model.embed_tokens.weight", "model.layers.0.input_layernorm.weight", "model.layers.2.self_attn.k_proj.bias"],
)
def test_a_value_that_is_not_finite_is_found_by_tensor_name(folder, name, value):
    tensor = load_file(folder / "model.safetensors")[name]
    tensor.view(-1)[5] = value
    change(folder, **{name: tensor})
    for quant in (QuantConfig(format="bf16"), QuantConfig()):
        with pytest.raises(FormatError, match=name):
            load_tiny(folder, quant=quant)


def test_an_index_that_names_a_missing_shard(tmp_path):
    write_tiny(tmp_path, shard_size="100KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"index\.json names a shard that is missing.*{shard.name}"):
        load_tiny(tmp_path)


def test_an_index_that_places_a_tensor_where_it_is_not(tmp_path):
    write_tiny(tmp_path, shard_size="100KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first, last = sorted(set(index["weight_map"].values()))[:: len(set(index["weight_map"].values())) - 1]
    name = next(name for name, shard in index["weight_map"].items() if shard == first)
    index["weight_map"][name] = last
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"{last} lacks tensor {name}"):
        load_tiny(tmp_path)


def test_a_folder_without_safetensors(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"no safetensors weights; got pytorch_model\.bin.*save_pretrained"):
        load_tiny(folder)


def test_a_path_that_is_no_folder(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        load_tiny(tmp_path / "absent")


def test_integers_in_place_of_weights_are_refused(tmp_path):
    from safetensors.torch import save_file

    from qerl.model.tensor_folder import TensorFolder

    save_file({"a.weight": torch.zeros(2, 2, dtype=torch.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"a\.weight is not of a floating-point type; got I32"):
        TensorFolder(tmp_path).check({"a.weight": (2, 2)}, frozenset())

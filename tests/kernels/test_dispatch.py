"""The dispatch point: what is asked for by name runs or raises; nothing falls back."""

import importlib

import pytest
import torch

from qerl.errors import KernelUnavailableError
from qerl.formats import get_format
from qerl.kernels import dispatch
from qerl.kernels.attention import packed_attention
from qerl.kernels.cached_attention import CacheRows, cached_attention
from qerl.kernels.fp4_linear import fp4_linear
from qerl.kernels.rms_norm import rms_norm
from qerl.kernels.token_logprobs import token_logprobs


@pytest.mark.parametrize("op", dispatch.OPERATIONS)
@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1"])
def test_auto_resolves_to_an_implementation_that_can_be_loaded(op, device):
    name = dispatch.resolve(op, device)
    assert name in dispatch.available(op)
    assert dispatch.load(op, device).__name__ == f"qerl.kernels.{op}.{name}"


@pytest.mark.parametrize("op", dispatch.OPERATIONS)
def test_every_operation_has_a_folder_with_a_reference(op):
    assert "reference" in dispatch.available(op)
    assert importlib.import_module(f"qerl.kernels.{op}").__doc__


def test_a_missing_kernel_is_named_with_what_exists():
    with pytest.raises(KernelUnavailableError, match=r"rms_norm.*'refrence'.*auto or one of.*Did you mean 'reference'"):
        dispatch.resolve("rms_norm", "cpu", "refrence")


def test_a_kernel_that_cannot_run_on_the_device_is_refused():
    with pytest.raises(KernelUnavailableError, match=r"'reference' kernel of attention does not run.*meta"):
        dispatch.resolve("attention", "meta", "reference")


def test_public_functions_pass_the_name_on():
    x, ids, cu = torch.zeros(2, 16), torch.zeros(2, dtype=torch.int64), torch.tensor([0, 2])
    heads = torch.zeros(2, 1, 4)
    calls = [
        lambda: rms_norm(x, torch.ones(16), 1e-6, kernel="none"),
        lambda: fp4_linear(x, get_format("nvfp4").quantize(torch.ones(4, 16)), kernel="none"),
        lambda: token_logprobs(x, torch.zeros(3, 16), ids, kernel="none"),
        lambda: packed_attention(heads, heads, heads, cu, 1.0, kernel="none"),
        lambda: cached_attention(
            x[:, :12], (x[:, :4], x[:, :4]), 1, 1, heads[:, None], heads[:, None], CacheRows(ids, 1), 1.0, kernel="none"
        ),
    ]
    for call in calls:
        with pytest.raises(KernelUnavailableError, match="'none'"):
            call()

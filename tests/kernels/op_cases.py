"""Inputs that the interpreter's tests and the GPU's share."""

from collections.abc import Iterator

import torch

from qerl.kernels import philox
from qerl.kernels.rms_norm import KeyedNoise, NormNoise, TableNoise
from qerl.kernels.rope import HeadBias, HeadNorms

STREAM = (11, "noise")


def random(*shape: int, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def keyed(draws: int, width: int, device: str = "cpu", **changes) -> KeyedNoise:
    given = {
        "key_2": torch.tensor(philox.stream_key(*STREAM), device=device),
        "width": width,
        "c1": 37,
        "c2_R": torch.arange(draws, device=device) + 5,
        "c3_1": torch.tensor([2], device=device),
        "spread": torch.tensor([0.1], device=device),
    }
    return KeyedNoise(**given | changes)


def noises(tokens: int, width: int, device: str = "cpu") -> Iterator[tuple[str, NormNoise | None]]:
    """Every form in which noise can come."""
    rows = (torch.arange(tokens) * 3 // max(tokens, 1)).to(device)
    noisy = (torch.arange(tokens) % 3 != 1).to(device)
    z_3D, z_TD = 0.1 * random(3, width, seed=5, device=device), 0.1 * random(tokens, width, seed=6, device=device)
    yield "none", None
    yield "vector", z_3D[0]
    yield "a row a token", z_TD
    yield "table", TableNoise(z_RD=z_3D, rows_T=rows, noisy_T=noisy)
    yield "one draw, clean prompts", TableNoise(z_RD=z_3D[:1], noisy_T=noisy)
    yield "keyed by token", keyed(tokens, width, device, c1_R=torch.arange(tokens, device=device) << 12, noisy_T=noisy)
    yield "keyed by sample", keyed(3, width, device, rows_T=rows, spread=z_3D[1].abs())


def rotation(positions: int, size: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Tables of cosines and of signed sines, float32 [positions, size]."""
    angle = torch.arange(positions)[:, None] * 50.0 ** -(torch.arange(size // 2) / (size // 2))
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1).to(device), torch.cat((-sin, sin), -1).to(device)


def head_norms(tokens: int, size: int, device: str = "cpu") -> HeadNorms:
    return HeadNorms(
        q_weight_d=1 + 0.1 * random(size, seed=7, device=device),
        k_weight_d=1 + 0.1 * random(size, seed=8, device=device),
        eps=1e-6,
        q_noise=0.1 * random(size, seed=9, device=device),
        k_noise=0.1 * random(tokens, size, seed=10, device=device),
    )


def head_bias(
    heads: int, kv_heads: int, size: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> HeadBias:
    return HeadBias(
        bias_X=2 * random((heads + 2 * kv_heads) * size, seed=11, device=device, dtype=dtype),
        shift_Kd=random(kv_heads, size, seed=12, device=device),
    )

"""Tensors that quantizers stumble over, and a comparison of bytes."""

import torch


def assert_same_bytes(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8).view_as(ours.view(torch.uint8)))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def outliers() -> torch.Tensor:
    weight = random(32, 128, seed=1)
    weight[3, 5], weight[9, 77] = 1e4, -3e4
    return weight


def zero_rows() -> torch.Tensor:
    weight = random(24, 64, seed=2)
    weight[0], weight[5, 16:32], weight[7], weight[8, ::2] = 0.0, 0.0, -0.0, -0.0
    return weight


def ties() -> torch.Tensor:
    """Every block holds 6, the tensor 2688: the scales are 1 and each midpoint is met exactly."""
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    beside = torch.cat([torch.nextafter(midpoints, torch.tensor(side)) for side in (0.0, 9.0)])
    block = torch.cat([midpoints, -midpoints, torch.tensor([6.0, -6.0])])
    blocks = torch.stack([block, torch.cat([beside, torch.tensor([6.0, 0.0])])] * 8).view(4, 64)
    blocks[0, 0] = 2688.0
    return blocks


def scale_ties() -> torch.Tensor:
    """Block scales that fall midway between two E4M3 numbers, subnormals of E4M3 among them."""
    scales = torch.tensor([448.0, 17.0, 19.0, 2**-7, 3 * 2**-10, 2**-10, 1.5 * 2**-9, 2**-12])
    return scales[:, None] * 6.0 * torch.linspace(-1, 1, 16)


CASES = {
    "normal": lambda: random(64, 256),
    "one block": lambda: random(1, 16),
    "heavy tails": lambda: random(32, 128, seed=3) ** 5,
    "small as weights": lambda: 0.02 * random(48, 96, seed=4),
    "bfloat16": lambda: (0.02 * random(48, 96, seed=5)).bfloat16(),
    "outliers": outliers,
    "zero rows": zero_rows,
    "ties": ties,
    "scale ties": scale_ties,
    "1e-38 elements": lambda: torch.where(random(16, 64, seed=6) > 0, random(16, 64, seed=7), torch.tensor(-1e-38)),
    "1e-38 tensor": lambda: 1e-38 * random(16, 64, seed=8),
    "1e-40 tensor": lambda: 1e-40 * random(16, 64, seed=9),
    "1e-33 tensor": lambda: 1e-33 * random(16, 64, seed=10),
    "1e37 tensor": lambda: 1e37 * random(16, 64, seed=11),
    "all binades": lambda: random(64, 64, seed=12) * 2.0 ** torch.arange(-120, 8, 2)[:, None],
}

"""Loss, gradient and clip shares against the installed TRL's own ``GRPOTrainer._compute_loss``, on the same log-probs.

The method is called on a stand-in that holds the attributes it reads; the code under it is the library's.
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from builders import completion

from qerl.objective.batch import Sample, pack
from qerl.objective.loss import FORMS, SurrogateSettings, divisors, surrogate, token_weights

pytest.importorskip("trl", reason="the package trl is not installed: pip install trl")
GRPOTrainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer

LENGTHS, MASKED = (4, 2, 6, 1, 5), (3,)
MAX_NEW = 8
TRL_NAMES = {
    "grpo": ("grpo", "token"),
    "dapo": ("dapo", "token"),
    "dr_grpo": ("dr_grpo", "token"),
    "bnpo": ("bnpo", "token"),
    "gspo": ("grpo", "sequence"),
    "cispo": ("cispo", "token"),
}
"""Ours -> TRL's loss_type and importance_sampling_level."""
CLIPS = {"gspo": (0.05, 0.1), "cispo": (None, 1.3)}


def draws(seed=0, spread=0.3):
    """Log-probs of policy, old policy and reference, and importance weights, padded [B, T] as TRL has them."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), max(LENGTHS))
    new = -1.0 + 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    old = new + spread * torch.randn(shape, generator=generator, dtype=torch.float64)
    reference = new + 0.4 * torch.randn(shape, generator=generator, dtype=torch.float64)
    weight = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5
    advantage = torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64)
    return new, old, reference, weight, advantage


def stand_in(kind, leaf, settings, weighted, updates):
    loss_type, level = TRL_NAMES[kind]
    low, high = settings.clip_low, settings.clip_high
    return SimpleNamespace(
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_low=low,
        epsilon_high=high,
        beta=settings.kl_coef,
        use_vllm=weighted,
        vllm_importance_sampling_correction=weighted,
        max_completion_length=MAX_NEW,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        args=SimpleNamespace(delta=settings.dual_clip, use_bias_correction_kl=False, steps_per_generation=updates),
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (leaf, torch.zeros_like(leaf), None),
    )


def trl_result(kind, settings, *, weighted=False, updates=1):
    new, old, reference, weight, advantage = draws()
    leaf = new.clone().requires_grad_()
    mask = torch.tensor(
        [[float(t < n and i not in MASKED) for t in range(max(LENGTHS))] for i, n in enumerate(LENGTHS)]
    )
    trainer = stand_in(kind, leaf, settings, weighted, updates)
    ids = torch.zeros(leaf.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones(len(LENGTHS), 1),
        "completion_ids": ids,
        "completion_mask": mask.double(),
        "advantages": advantage,
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
        "importance_sampling_ratio": weight,
        # Two updates a rollout: TRL's count is that of the whole generation batch, here this update twice over.
        "num_items_in_batch": updates * mask.sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.item(), gradient, {key: values[-1] for key, values in trainer._metrics["train"].items()}


def our_result(kind, settings, *, weighted=False, updates=1):
    new, old, reference, weight, advantage = draws()
    inside = torch.tensor([[t < n for t in range(max(LENGTHS))] for n in LENGTHS])
    leaf = new.clone().requires_grad_()
    part = [
        Sample(completion=completion(1, [-1.0] * n, key=i), advantage=0.0, in_loss=i not in MASKED)
        for i, n in enumerate(LENGTHS)
    ]
    counts = divisors(part, [part] * updates, updates, MAX_NEW)
    (batch,) = pack(part, 1000, torch.device("cpu"))
    result = surrogate(
        leaf[inside],
        old[inside],
        advantage[batch.sequence_N],
        token_weights(batch, FORMS[kind].divisor, counts),
        settings,
        sequence_N=batch.sequence_N,
        lengths_S=batch.answer_lengths_S,
        importance_N=weight[inside] if weighted else None,
        reference_N=reference[inside] if settings.kl_coef else None,
    )
    (gradient,) = torch.autograd.grad(result.loss, leaf)
    in_loss = batch.loss_mask_S[batch.sequence_N]
    shares = {
        "clip_ratio/low_mean": result.low_clipped_N[in_loss].double().mean().item(),
        "clip_ratio/high_mean": result.high_clipped_N[in_loss].double().mean().item(),
    }
    if result.kl_N is not None:
        shares["kl"] = result.kl_N[in_loss].mean().item()
    return result.loss.item(), gradient, shares


def settings_of(kind, **changed):
    low, high = CLIPS.get(kind, (0.2, 0.28))
    return SurrogateSettings(**{"form": FORMS[kind], "clip_low": low, "clip_high": high, **changed})


CASES = [
    *[(kind, {}, {}) for kind in FORMS],
    *[(kind, {"kl_coef": 0.07}, {}) for kind in FORMS],
    *[(kind, {"dual_clip": 1.35}, {}) for kind in FORMS if kind != "cispo"],
    *[(kind, {"kl_coef": 0.07}, {"weighted": True}) for kind in FORMS],
    ("dapo", {}, {"updates": 2}),
    ("cispo", {}, {"updates": 2}),
]


@pytest.mark.parametrize(("kind", "changed", "how"), CASES)
def test_loss_and_gradient_are_trls(kind, changed, how):
    settings = settings_of(kind, **changed)
    loss, gradient, _ = our_result(kind, settings, **how)
    expected_loss, expected_gradient, _ = trl_result(kind, settings, **how)
    # Token weights and TRL's mask are float32.
    assert loss == pytest.approx(expected_loss, rel=1e-6, abs=1e-7)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-8)
    assert gradient.abs().max() > 0


@pytest.mark.parametrize("kind", ["grpo", "dapo", "dr_grpo", "bnpo"])
def test_clip_shares_and_kl_are_trls(kind):
    settings = settings_of(kind, kl_coef=0.07)
    shares, expected = our_result(kind, settings)[2], trl_result(kind, settings)[2]
    assert shares == pytest.approx({key: expected[key] for key in shares}, rel=1e-6)
    assert all(shares.values())

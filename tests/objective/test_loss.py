import math

import pytest
import torch
from builders import completion

from qerl.objective.batch import Sample, pack
from qerl.objective.loss import divisors, importance_weights, k3, surrogate, token_weights

CPU = torch.device("cpu")
KINDS = ["grpo", "dapo", "dr_grpo"]


def samples(lengths=(2, 3, 1), masked=()):
    return [
        Sample(completion=completion(2, [-0.7] * n, key=i), advantage=1.0 - i, in_loss=i not in masked)
        for i, n in enumerate(lengths)
    ]


def weights(kind, part, rollout=None, updates=1, max_new=8, budget=1000):
    counts = divisors(part, rollout or [part], updates, max_new)
    return [token_weights(batch, kind, counts) for batch in pack(part, budget, CPU)]


def test_divisors_by_hand():
    part = samples()
    assert weights("grpo", part)[0].tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 9, 1 / 9, 1 / 9, 1 / 3])
    assert weights("dapo", part)[0].tolist() == pytest.approx([1 / 6] * 6)
    assert weights("dr_grpo", part)[0].tolist() == pytest.approx([1 / 24] * 6)


def test_masked_sequences_leave_the_token_count_and_keep_the_sequence_count():
    part = samples(masked=(1,))
    assert weights("dapo", part)[0].tolist() == pytest.approx([1 / 3, 1 / 3, 0, 0, 0, 1 / 3])
    assert weights("grpo", part)[0].tolist() == pytest.approx([1 / 6, 1 / 6, 0, 0, 0, 1 / 3])
    assert weights("dr_grpo", part)[0].tolist() == pytest.approx([1 / 24, 1 / 24, 0, 0, 0, 1 / 24])


def test_dapo_divides_by_the_whole_rollout_also_with_several_updates():
    first, second = samples((2, 2)), samples((4, 4))
    for part in (first, second):
        (weight,) = weights("dapo", part, [first, second], updates=2)
        assert weight.unique().tolist() == pytest.approx([2 / 12])


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradient_do_not_depend_on_the_packing(kind):
    part = samples((2, 3, 1, 4))
    logprobs = torch.linspace(-2.0, -0.2, 10, requires_grad=True)

    def loss_and_grad(budget):
        counts = divisors(part, [part], 1, 8)
        total, offset = 0.0, 0
        for batch in pack(part, budget, CPU):
            piece = logprobs[offset : offset + batch.targets_N.numel()]
            offset += batch.targets_N.numel()
            result = surrogate(
                piece,
                batch.behavior_logprobs_N,
                batch.advantages_S[batch.sequence_N],
                token_weights(batch, kind, counts),
                clip_low=0.2,
                clip_high=0.28,
            )
            total = total + result.loss
        return total.detach(), torch.autograd.grad(total, logprobs)[0]

    whole, pieces = loss_and_grad(1000), loss_and_grad(6)
    torch.testing.assert_close(whole[0], pieces[0], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(whole[1], pieces[1], rtol=1e-6, atol=1e-7)


def one_token(logp, denominator, advantage, **settings):
    leaf = torch.tensor([logp], requires_grad=True)
    result = surrogate(
        leaf,
        torch.tensor([denominator]),
        torch.tensor([advantage]),
        torch.ones(1),
        clip_low=0.2,
        clip_high=0.28,
        **settings,
    )
    (gradient,) = torch.autograd.grad(result.loss, leaf)
    return result, gradient.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.5, 1.0, -1.28, 0.0),  # clipped above
        (1.5, -1.0, 1.5, 1.5),  # pessimistic side stays
        (0.5, 1.0, -0.5, -0.5),
        (0.5, -1.0, 0.8, 0.0),  # clipped below
        (1.25, 1.0, -1.25, -1.25),  # inside clip-higher
    ],
)
def test_clipping_by_hand(ratio, advantage, loss, gradient):
    result, slope = one_token(math.log(ratio) - 1.0, -1.0, advantage)
    assert result.loss.item() == pytest.approx(loss, abs=1e-6)
    assert slope == pytest.approx(gradient, abs=1e-6)


def test_clip_flags_go_by_side():
    above, _ = one_token(0.5, 0.0, 1.0)
    below, _ = one_token(-0.5, 0.0, -1.0)
    harmless, _ = one_token(0.5, 0.0, -1.0)
    assert (above.high_clipped_N.item(), above.low_clipped_N.item()) == (True, False)
    assert (below.high_clipped_N.item(), below.low_clipped_N.item()) == (False, True)
    assert not harmless.high_clipped_N.item() and not harmless.low_clipped_N.item()


def test_importance_weight_scales_the_policy_term_and_not_the_kl():
    reference = torch.tensor([-1.2])
    plain, _ = one_token(-1.0, -1.0, 1.0, reference_N=reference, kl_coef=0.5)
    weighted, _ = one_token(-1.0, -1.0, 1.0, reference_N=reference, kl_coef=0.5, importance_N=torch.tensor([1.7]))
    kl = math.exp(-0.2) + 0.2 - 1.0
    assert plain.loss.item() == pytest.approx(-1.0 + 0.5 * kl, abs=1e-6)
    assert weighted.loss.item() == pytest.approx(-1.7 + 0.5 * kl, abs=1e-6)


def test_importance_weights_are_truncated_above_only():
    old, behavior = torch.tensor([0.0, 0.0, 0.0]), torch.log(torch.tensor([0.25, 1.0, 4.0]))
    assert importance_weights(old, behavior, 2.0).tolist() == pytest.approx([2.0, 1.0, 0.25])
    assert importance_weights(old, behavior, None) is None


def test_k3_averages_to_the_exact_kl():
    p, q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    exact = (p * (p / q).log()).sum()
    torch.testing.assert_close((p * k3(p.log(), q.log())).sum(), exact)
    assert (k3(p.log(), q.log()) >= 0).all()


def test_gradient_against_finite_differences_in_float64():
    generator = torch.Generator().manual_seed(0)
    logp = (torch.randn(12, generator=generator, dtype=torch.float64) * 0.3 - 1.0).requires_grad_()
    old = logp.detach() + 0.05 * torch.randn(12, generator=generator, dtype=torch.float64)
    advantage = torch.randn(12, generator=generator, dtype=torch.float64)
    reference = logp.detach() + 0.3

    def loss(x):
        return surrogate(
            x, old, advantage, torch.full((12,), 1 / 12, dtype=torch.float64),
            clip_low=0.2, clip_high=0.28, reference_N=reference, kl_coef=0.1,
        ).loss  # fmt: skip

    assert torch.autograd.gradcheck(loss, (logp,))


def test_grpo_equals_dapo_when_all_answers_have_one_length():
    part = samples((3, 3, 3))
    torch.testing.assert_close(weights("grpo", part)[0], weights("dapo", part)[0])

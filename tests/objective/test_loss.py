import math

import pytest
import torch
from builders import completion

from qerl.objective.batch import Sample, pack
from qerl.objective.loss import FORMS, SurrogateSettings, divisors, kl_estimate, surrogate, token_weights

CPU = torch.device("cpu")
KINDS = list(FORMS)
CLIPS = {"gspo": (0.1, 0.15), "cispo": (None, 1.2)}
"""Clips that are active at the ratios of these tests; the others take 0.2 and 0.28."""


def settings(kind="dapo", **changed):
    low, high = CLIPS.get(kind, (0.2, 0.28))
    return SurrogateSettings(**{"form": FORMS[kind], "clip_low": low, "clip_high": high, **changed})


def samples(lengths=(2, 3, 1), masked=()):
    return [
        Sample(completion=completion(2, [-0.7] * n, key=i), advantage=1.0 - i, in_loss=i not in masked)
        for i, n in enumerate(lengths)
    ]


def weights(kind, part, rollout=None, updates=1, max_new=8, budget=1000):
    counts = divisors(part, rollout or [part], updates, max_new)
    return [token_weights(batch, FORMS[kind].divisor, counts) for batch in pack(part, budget, CPU)]


def test_divisors_by_hand():
    part = samples()
    assert weights("grpo", part)[0].tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 9, 1 / 9, 1 / 9, 1 / 3])
    assert weights("dapo", part)[0].tolist() == pytest.approx([1 / 6] * 6)
    assert weights("bnpo", part)[0].tolist() == pytest.approx([1 / 6] * 6)
    assert weights("dr_grpo", part)[0].tolist() == pytest.approx([1 / 24] * 6)


@pytest.mark.parametrize(("kind", "like"), [("gspo", "grpo"), ("cispo", "dapo")])
def test_gspo_divides_as_grpo_and_cispo_as_dapo(kind, like):
    part = samples(masked=(1,))
    assert torch.equal(weights(kind, part)[0], weights(like, part)[0])


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


def test_bnpo_divides_by_the_tokens_of_the_update_alone():
    first, second = samples((2, 2)), samples((4, 4), masked=(1,))
    for part, tokens in ((first, 4), (second, 4)):
        (weight,) = weights("bnpo", part, [first, second], updates=2)
        assert weight.max().item() == pytest.approx(1 / tokens)


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
                token_weights(batch, FORMS[kind].divisor, counts),
                settings(kind),
                sequence_N=batch.sequence_N,
                lengths_S=batch.answer_lengths_S,
            )
            total = total + result.loss
        return total.detach(), torch.autograd.grad(total, logprobs)[0]

    whole, pieces = loss_and_grad(1000), loss_and_grad(6)
    torch.testing.assert_close(whole[0], pieces[0], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(whole[1], pieces[1], rtol=1e-6, atol=1e-7)


def one_token(logp, denominator, advantage, rules=None, **tensors):
    leaf = torch.tensor([logp], requires_grad=True)
    result = surrogate(
        leaf,
        torch.tensor([denominator]),
        torch.tensor([advantage]),
        torch.ones(1),
        rules or settings(),
        sequence_N=torch.tensor([0]),
        lengths_S=torch.tensor([1]),
        **tensors,
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
    rules = settings(kl_coef=0.5)
    plain, _ = one_token(-1.0, -1.0, 1.0, rules, reference_N=reference)
    weighted, _ = one_token(-1.0, -1.0, 1.0, rules, reference_N=reference, importance_N=torch.tensor([1.7]))
    kl = math.exp(-0.2) + 0.2 - 1.0
    assert plain.loss.item() == pytest.approx(-1.0 + 0.5 * kl, abs=1e-6)
    assert weighted.loss.item() == pytest.approx(-1.7 + 0.5 * kl, abs=1e-6)


def distributions():
    generator = torch.Generator().manual_seed(3)
    logits, reference = torch.randn(2, 4, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), reference.log_softmax(-1)


def kl(p, q):
    return (p * (p / q).log()).sum()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_average_to_the_exact_kl(estimator):
    logits, reference = distributions()
    logp = logits.log_softmax(-1).detach()
    values = kl_estimate(logp, reference, estimator)
    torch.testing.assert_close((logp.exp() * values).sum(), kl(logp.exp(), reference.exp()))
    assert estimator == "k1" or (values >= 0).all()


def test_k2_is_half_the_squared_log_ratio():
    assert kl_estimate(torch.tensor([-1.0]), torch.tensor([-1.6]), "k2").item() == pytest.approx(0.18)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_mean_gradient_of_each_kl_estimator_in_the_loss(estimator):
    """Sampled tokens carry no gradient of their own, so a loss differentiates the estimate alone."""
    logits, reference = distributions()
    logp = logits.log_softmax(-1)
    mean = (logp.exp().detach() * kl_estimate(logp, reference, estimator)).sum()
    (gradient,) = torch.autograd.grad(mean, logits)
    exact = {
        "k1": 0.0 * logits.sum(),
        "k2": kl(logits.softmax(-1), reference.exp()),
        "k3": kl(reference.exp(), logits.softmax(-1)),
    }[estimator]
    torch.testing.assert_close(gradient, torch.autograd.grad(exact, logits)[0])


ORACLE_RULES = [
    *[(kind, {}) for kind in KINDS],
    *[(kind, {"dual_clip": 1.35}) for kind in KINDS if kind != "cispo"],
    ("dapo", {"clip_low": None}),
    *[("grpo", {"kl_coef": 0.1, "kl_estimator": estimator}) for estimator in ("k1", "k2", "k3")],
    ("gspo", {"kl_coef": 0.1}),
]


@pytest.mark.parametrize(("kind", "changed"), ORACLE_RULES)
def test_gradient_against_finite_differences_in_float64(kind, changed):
    """A stopped gradient is not a derivative of the value, so cispo's weight is held fixed here."""
    generator = torch.Generator().manual_seed(0)
    logp = torch.randn(12, generator=generator, dtype=torch.float64) * 0.3 - 1.0
    old = logp + 0.2 * torch.randn(12, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([3, 1, 6, 2])
    sequence = torch.repeat_interleave(torch.arange(4), lengths)
    advantage = torch.randn(4, generator=generator, dtype=torch.float64)[sequence]
    rules = settings(kind, **changed)

    def loss(x):
        # Moving the denominator along keeps cispo's ratio, and so its weight, where it is.
        denominator = old + (x - logp).detach() if kind == "cispo" else old
        return surrogate(
            x, denominator, advantage, torch.full((12,), 1 / 12, dtype=torch.float64), rules,
            sequence_N=sequence, lengths_S=lengths, importance_N=old.exp(), reference_N=logp + 0.3,
        ).loss  # fmt: skip

    assert torch.autograd.gradcheck(loss, (logp.clone().requires_grad_(),))


@pytest.mark.parametrize(("ratio", "gradient"), [(1.2, 1.2), (1.9, 1.9), (2.9, 2.9), (3.1, 0.0), (50.0, 0.0)])
def test_dual_clip_ends_the_gradient_of_a_negative_advantage(ratio, gradient):
    rules = settings(dual_clip=3.0)
    result, slope = one_token(math.log(ratio), 0.0, -1.0, rules)
    assert result.loss.item() == pytest.approx(min(ratio, 3.0), rel=1e-5)
    assert slope == pytest.approx(gradient, rel=1e-5)
    assert result.dual_clipped_N.item() == (ratio > 3)
    positive, _ = one_token(math.log(ratio), 0.0, 1.0, rules)
    assert positive.loss.item() == pytest.approx(-min(ratio, 1.28), rel=1e-5) and not positive.dual_clipped_N.item()


def test_without_a_lower_clip_small_ratios_keep_their_gradient():
    _, slope = one_token(math.log(0.5), 0.0, -1.0, settings(clip_low=None))
    assert slope == pytest.approx(0.5)


def test_gspo_takes_the_mean_ratio_of_the_sequence_by_hand():
    logp = torch.log(torch.tensor([0.5, 0.8, 0.3])).requires_grad_()
    old = torch.log(torch.tensor([0.4, 0.9, 0.3]))
    result = surrogate(
        logp, old, torch.tensor([2.0, 2.0, -1.0]), torch.tensor([0.25, 0.25, 0.5]), settings("gspo"),
        sequence_N=torch.tensor([0, 0, 1]), lengths_S=torch.tensor([2, 1]),
    )  # fmt: skip
    mean = math.sqrt(0.5 / 0.4 * 0.8 / 0.9)
    assert result.ratio_N.tolist() == pytest.approx([mean, mean, 1.0])
    assert result.loss.item() == pytest.approx(-0.5 * 2 * mean + 0.5)
    (gradient,) = torch.autograd.grad(result.loss, logp)
    assert gradient.tolist() == pytest.approx([-0.5 * 2 * mean / 2] * 2 + [0.5])


def test_gspo_clips_whole_sequences():
    logp = torch.tensor([0.5, -0.1, 0.0]).requires_grad_()
    result = surrogate(
        logp, torch.zeros(3), torch.tensor([1.0, 1.0, 1.0]), torch.ones(3), settings("gspo"),
        sequence_N=torch.tensor([0, 0, 1]), lengths_S=torch.tensor([2, 1]),
    )  # fmt: skip
    assert result.high_clipped_N.tolist() == [True, True, False]
    assert torch.autograd.grad(result.loss, logp)[0].tolist() == pytest.approx([0.0, 0.0, -1.0])


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(("ratio", "weight"), [(0.1, 0.1), (1.0, 1.0), (4.9, 4.9), (7.0, 5.0)])
def test_cispo_weighs_the_log_prob_and_never_drops_a_token(advantage, ratio, weight):
    result, slope = one_token(math.log(ratio) - 2.0, -2.0, advantage, settings("cispo", clip_high=5.0))
    assert slope == pytest.approx(-weight * advantage, rel=1e-5)
    assert result.loss.item() == pytest.approx(-weight * advantage * (math.log(ratio) - 2.0), rel=1e-5)
    assert result.high_clipped_N.item() == (ratio > 5)


def gradient_of(kind, part, shift=0.0, **changed):
    """Gradient of the update's loss by log-prob, at ratios exp(shift) around the recorded log-probs."""
    counts = divisors(part, [part], 1, 8)
    (batch,) = pack(part, 1000, CPU)
    leaf = (batch.behavior_logprobs_N + shift).requires_grad_()
    result = surrogate(
        leaf,
        batch.behavior_logprobs_N,
        batch.advantages_S[batch.sequence_N],
        token_weights(batch, FORMS[kind].divisor, counts),
        settings(kind, **changed),
        sequence_N=batch.sequence_N,
        lengths_S=batch.answer_lengths_S,
    )
    return torch.autograd.grad(result.loss, leaf)[0]


def test_grpo_equals_dapo_when_all_answers_have_one_length():
    torch.testing.assert_close(gradient_of("grpo", samples((3, 3, 3))), gradient_of("dapo", samples((3, 3, 3))))


def test_bnpo_equals_dapo_with_one_update_a_rollout():
    part = samples(masked=(2,))
    assert torch.equal(gradient_of("bnpo", part), gradient_of("dapo", part))


@pytest.mark.parametrize("shift", [-0.3, -0.05, 0.0, 0.05, 0.3])
def test_gspo_equals_grpo_for_answers_of_one_token(shift):
    part, clips = samples((1, 1, 1)), {"clip_low": 0.2, "clip_high": 0.28}
    torch.testing.assert_close(gradient_of("gspo", part, shift, **clips), gradient_of("grpo", part, shift, **clips))


def test_dr_grpo_equals_grpo_when_all_answers_are_full():
    torch.testing.assert_close(gradient_of("dr_grpo", samples((8, 8))), gradient_of("grpo", samples((8, 8))))


def test_on_policy_every_objective_is_reinforce_up_to_its_divisor():
    """At ratio 1 the gradient by log-prob is -A times the token's weight, whatever the objective."""
    part = samples()
    (batch,) = pack(part, 1000, CPU)
    for kind in KINDS:
        expected = -batch.advantages_S[batch.sequence_N] * weights(kind, part)[0]
        torch.testing.assert_close(gradient_of(kind, part), expected)


@pytest.mark.parametrize("shift", [-0.15, 0.0, 0.15])
def test_inside_the_clip_cispo_has_the_gradient_of_dapo(shift):
    """rho * grad log pi is grad rho: dropping the stop-gradient changes nothing until a clip acts."""
    torch.testing.assert_close(gradient_of("cispo", samples(), shift), gradient_of("dapo", samples(), shift))

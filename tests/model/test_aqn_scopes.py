"""Noise that differs between samples, positions, projections or norms: what is equal to what, and what is not."""

import pytest
import torch
from tiny_models import decoder_logits, load_tiny, pack, random_tokens, randomize_adapters, write_tiny

from qerl.config.schema import LoraConfig
from qerl.errors import ConfigError
from qerl.kernels import philox
from qerl.kernels.rms_norm import noise_values
from qerl.model.aqn import NoiseState, places, z_over_w
from qerl.model.attention import PackedSequences

SITES = ("attn_norm", "mlp_norm", "final_norm")
SCOPES = ("rollout", "group", "response", "token")
LENGTHS, PROMPTS = (9, 14, 9, 14), (4, 6, 4, 6)

LOGIT_TOLERANCE = 1e-4
"""float32 logits of one sequence alone and in a pack; measured: 2e-5."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_tiny(folder)
    made = load_tiny(folder, lora=LoraConfig(rank=4))
    randomize_adapters(made)
    return made


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    write_tiny(folder, "qwen3-wide-heads")
    return load_tiny(folder)


def state(**changes):
    settings = {"seed": 3, "rollout": 5, "stage": 1, "sigma": 0.2, "sites": SITES, "group_size": 2}
    return NoiseState(**{**settings, **changes})


def context(keys=(0, 1, 2, 3), lengths=LENGTHS, prompts=PROMPTS):
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    return PackedSequences(bounds, sample_keys_S=torch.tensor(keys), prompt_lengths_S=torch.tensor(prompts))


def z_of(model, place=(1, "mlp_norm"), where=None, **changes):
    """z of one place for every sequence: a list of [T, D], one a sequence."""
    where = where or context()
    z = state(**changes).materialize(model).for_pass(where).z(*place)
    z = z.expand(len(where.positions_T), -1)
    return z.split(where.cu_seqlens_S1.diff().tolist())


@torch.no_grad()
def logits(model, sequences, where, noise):
    return model.logits(model(torch.cat(sequences), where, noise=noise))


# Keys


@pytest.mark.parametrize(
    ("scope", "different"),
    [("rollout", 1), ("group", 2), ("response", 4)],
)
def test_how_many_draws_a_scope_makes_of_four_samples_in_two_groups(model, scope, different):
    draws = [z[0] for z in z_of(model, scope=scope)]
    assert len({tuple(z.tolist()) for z in draws}) == different
    assert torch.equal(draws[0], draws[1]) == (scope != "response")
    for z in z_of(model, scope=scope):
        assert (z == z[0]).all(), "one draw for all positions"


def test_token_noise_differs_by_sample_and_position_and_nothing_else(model):
    rows = torch.cat(z_of(model, scope="token"))
    assert len({tuple(row.tolist()) for row in rows}) == sum(LENGTHS)
    alone = z_of(model, scope="token", where=context((2,), (9,), (4,)))
    assert torch.equal(alone[0], z_of(model, scope="token")[2])


@pytest.mark.parametrize("scope", ["group", "response", "token"])
def test_counters_are_the_documented_ones(model, scope):
    z = z_of(model, scope=scope)[3]
    position = 7
    expected = 0.2 * philox.normal(
        3,
        "noise",
        64,
        c1=1 | 1 << 4 | (position << 12 if scope == "token" else 0),
        c2=3 // 2 if scope == "group" else 3,
        c3=5,
    )
    assert torch.equal(z[position], expected)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("prompt", ["noisy", "clean"])
@pytest.mark.parametrize("magnitude", ["absolute", "relative"])
def test_what_the_kernels_are_given_has_the_values_of_z(model, scope, prompt, magnitude):
    where = context()
    seen = state(scope=scope, prompt=prompt, magnitude=magnitude).materialize(model).for_pass(where)
    place = (1, "mlp_norm")
    values = noise_values(seen.of_norm(*place))
    assert torch.equal(values.expand(sum(LENGTHS), -1), seen.z(*place).expand(sum(LENGTHS), -1))
    assert seen.of_norm(1, "q_norm") is None


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("change", [{"rollout": 6}, {"seed": 4}, {"stream": "eval_noise"}])
def test_another_rollout_seed_or_stream_gives_other_noise(model, scope, change):
    one, other = torch.cat(z_of(model, scope=scope)), torch.cat(z_of(model, scope=scope, **change))
    assert not (one == other).any()


@pytest.mark.parametrize("scope", ["group", "response", "token"])
def test_a_prompt_drawn_twice_in_a_rollout_has_different_noise(model, scope):
    first, second = z_of(model, scope=scope, where=context((1, 7), (9, 9), (4, 4)))
    assert not (first == second).any()


def test_spread_of_keyed_draws_is_sigma(model):
    where = context(tuple(range(200)), (1,) * 200, (1,) * 200)
    values = torch.cat(z_of(model, scope="response", where=where)) / 0.2
    count = values.numel()
    assert abs(values.mean()) < 4 / count**0.5
    assert abs(values.var() - 1) < 4 * (2 / count) ** 0.5


def test_rows_of_normals_equal_single_draws():
    keys, counters = torch.tensor([0, 5, 70_000]), torch.tensor([1, 1 << 31, 9])
    for n in (1, 6, 7, 128):
        rows = philox.normal_rows(3, "s", n, c1=counters, c2=keys, c3=2)
        for row, key, counter in zip(rows, keys.tolist(), counters.tolist(), strict=True):
            assert torch.equal(row, philox.normal(3, "s", n, c1=counter, c2=key, c3=2))


# The forward pass


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("prompt", ["noisy", "clean"])
@pytest.mark.parametrize("sharing", ["shared", "independent"])
def test_a_packed_pass_gives_each_sample_the_noise_it_has_alone(model, scope, prompt, sharing):
    sequences = random_tokens(LENGTHS)
    noise = state(scope=scope, prompt=prompt, sharing=sharing).materialize(model)
    together = logits(model, sequences, context(), noise).split(LENGTHS)
    for index, sequence in enumerate(sequences):
        alone = logits(
            model, [sequence], context((index,), LENGTHS[index : index + 1], PROMPTS[index : index + 1]), noise
        )
        torch.testing.assert_close(together[index], alone, rtol=0, atol=LOGIT_TOLERANCE)


@pytest.mark.parametrize("scope", ["rollout", "group", "response"])
def test_noise_of_one_sample_equals_adding_its_draw_to_the_scales(model, scope):
    (sequence,) = random_tokens((9,))
    where = context((3,), (9,), (4,))
    noise = state(scope=scope).materialize(model)
    noisy = logits(model, [sequence], where, noise)
    seen = noise.for_pass(where)
    before = {place: model.norm_weight(*place).detach().clone() for place in noise.places()}
    with torch.no_grad():
        for place in noise.places():
            z = seen.z(*place)
            model.norm_weight(*place).add_(z if z.dim() == 1 else z[0])
        by_hand = logits(model, [sequence], where, None)
        for place, weight in before.items():
            model.norm_weight(*place).copy_(weight)
    assert torch.equal(noisy, by_hand)


@pytest.mark.parametrize("scope", SCOPES)
def test_a_clean_prompt_is_computed_as_without_noise_and_the_answer_is_not(model, scope):
    sequences = random_tokens(LENGTHS)
    noisy = logits(model, sequences, context(), state(scope=scope, prompt="clean").materialize(model)).split(LENGTHS)
    clean = logits(model, sequences, context(), None).split(LENGTHS)
    for one, other, prompt in zip(noisy, clean, PROMPTS, strict=True):
        assert torch.equal(one[:prompt], other[:prompt]), "the last prompt token is of the prompt"
        assert ((one[prompt:] - other[prompt:]).abs().amax(-1) > 1e-3).all()


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("sharing", ["shared", "independent"])
def test_sigma_zero_is_bit_identical_to_no_noise(model, scope, sharing):
    sequences = random_tokens(LENGTHS)
    quiet = state(sigma=0.0, scope=scope, sharing=sharing).materialize(model)
    assert quiet.places() == ()
    if sharing == "shared":
        assert torch.equal(logits(model, sequences, context(), quiet), logits(model, sequences, context(), None))


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("sharing", ["shared", "independent"])
def test_recomputing_layers_in_the_backward_pass_replays_the_noise(model, scope, sharing):
    sequences, noise = random_tokens(LENGTHS), state(scope=scope, sharing=sharing).materialize(model)
    gradients = []
    for checkpointing in ("none", "selective", "full"):
        hidden = model(torch.cat(sequences), context(), noise=noise, checkpointing=checkpointing)
        model.logits(hidden).square().mean().backward()
        parameters = model.trainable_parameters()
        gradients.append({name: parameter.grad.clone() for name, parameter in parameters.items()})
        for parameter in parameters.values():
            parameter.grad = None
    for name, gradient in gradients[0].items():
        for other in gradients[1:]:
            torch.testing.assert_close(gradient, other[name], rtol=1e-5, atol=1e-8)


def test_scopes_that_differ_between_samples_ask_whose_tokens_these_are(model):
    (sequence,) = random_tokens((9,))
    noise = state(scope="response").materialize(model)
    with pytest.raises(AssertionError, match="whose tokens"):
        decoder_logits(model, [sequence], noise=noise)


# Sharing


def test_independent_draws_give_each_projection_the_scale_w_plus_its_own_z(model):
    """q, k, v of the first layer against the identity W_p (u * (w + z_p)), formed from the plain norm by hand."""
    noise = state(sharing="independent").materialize(model)
    layer = model.layers[0]
    x_TD = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    u_TD = x_TD * torch.rsqrt(x_TD.square().mean(-1, keepdim=True) + model.spec.rms_eps)
    where = context((0,), (5,), (1,))
    with torch.no_grad():
        found = layer._normed("attn_norm", layer.qkv, x_TD, None, noise.for_pass(where), True, False)[0].split(
            layer.qkv.sizes, -1
        )
        for index, part in enumerate(("q_proj", "k_proj", "v_proj")):
            z_D = noise.z(0, f"attn_norm/{part}")
            by_hand = layer.qkv(u_TD * (layer.attn_norm + z_D))[index]
            torch.testing.assert_close(found[index], by_hand, rtol=0, atol=1e-5)


def test_a_member_product_is_its_rows_of_the_fused_product(model):
    x_TI = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    for linear in model.grouped_linears():
        x = x_TI if linear.weight.shape[1] == 64 else torch.randn(3, linear.weight.shape[1])
        whole = linear(x)
        for index, part in enumerate(linear.parts):
            torch.testing.assert_close(linear.member(part, x), whole[index], rtol=0, atol=1e-5)
            dense, linear.dense_OI = linear.dense_OI, None
            torch.testing.assert_close(linear.member(part, x), whole[index], rtol=0, atol=1e-5)
            linear.dense_OI = dense


def test_shared_noise_correlates_what_q_and_k_see_and_independent_noise_does_not(model):
    """Covariance over draws of the relative perturbation z / w of q's and k's input: sigma^2 / w^2 or nothing."""

    def draws(sharing, *names):
        noise = state(scope="response", sharing=sharing, sites=("attn_norm",)).materialize(model)
        return [noise.draw((0, name), torch.arange(400)).double() for name in names]

    (shared,) = draws("shared", "attn_norm")
    q, k, v = draws("independent", "attn_norm/q_proj", "attn_norm/k_proj", "attn_norm/v_proj")
    variance, count = 0.2**2, shared.numel()
    assert (shared * shared).mean() == pytest.approx(variance, rel=0.05)
    for own in (q, k, v):
        assert (own * own).mean() == pytest.approx(variance, rel=0.05), "the same spread for each projection"
    for one, other in ((q, k), (q, v), (k, v)):
        assert abs((one * other).mean()) < 4 * variance / count**0.5
    layer, u = model.layers[0], torch.ones(1, 64)
    weights = [layer.qkv.dense_OI[slice(*layer.qkv.rows_of(part))].double() for part in ("q_proj", "k_proj")]
    row = [weight[0] * u[0] for weight in weights]
    cross = float((row[0] * row[1]).sum()) * variance
    together = ((shared @ row[0]) * (shared @ row[1])).mean()
    apart = ((q @ row[0]) * (k @ row[1])).mean()
    error = 4 * variance * float(row[0].norm() * row[1].norm()) / 400**0.5
    assert abs(together - cross) < 1.5 * error
    assert abs(apart) < error


# Sites


def test_noise_of_the_query_and_key_norms_equals_adding_z_to_their_scales(qwen3):
    sequences = random_tokens((11, 25))
    noise = state(sites=("qk_norm",)).materialize(qwen3)
    assert noise.places() == tuple((layer, name) for layer in range(3) for name in ("q_norm", "k_norm"))
    assert noise.z(0, "q_norm").shape == (32,)
    noisy = decoder_logits(qwen3, sequences, noise=noise)
    before = decoder_logits(qwen3, sequences)
    with torch.no_grad():
        for place in noise.places():
            qwen3.norm_weight(*place).add_(noise.z(*place))
        by_hand = decoder_logits(qwen3, sequences)
        for place in noise.places():
            qwen3.norm_weight(*place).sub_(noise.z(*place))
    assert torch.equal(noisy, by_hand)
    assert (noisy - before).abs().max() > 1e-3


@pytest.mark.parametrize("scope", ["response", "token"])
def test_query_and_key_norms_take_noise_that_differs_between_samples(qwen3, scope):
    sequences = random_tokens(LENGTHS)
    noise = state(sites=("qk_norm",), scope=scope).materialize(qwen3)
    together = logits(qwen3, sequences, context(), noise).split(LENGTHS)
    alone = logits(qwen3, sequences[2:3], context((2,), (9,), (4,)), noise)
    torch.testing.assert_close(together[2], alone, rtol=0, atol=LOGIT_TOLERANCE)
    assert not torch.allclose(together[2], logits(qwen3, sequences[2:3], context((0,), (9,), (4,)), noise), atol=1e-4)


@pytest.mark.parametrize("site", ["qk_norm", "input_norm"])
def test_a_site_that_the_model_does_not_have_is_refused_by_name(model, site):
    with pytest.raises(ConfigError, match=f"{site}.*qwen2.*attn_norm, mlp_norm, final_norm"):
        state(sites=("attn_norm", site)).materialize(model)


# Magnitudes and accumulation


def test_sensitivity_scales_each_place_by_its_factor_and_weight(model):
    where = places(SITES, "shared", model.spec)
    factors = tuple(0.5 + index for index in range(len(where)))
    noise = state(magnitude="sensitivity", site_scales=factors, factor=2.0).materialize(model)
    plain = state(sigma=1.0).materialize(model)
    for place, factor in zip(where, factors, strict=True):
        expected = plain.z(*place) * 0.4 * factor * model.norm_weight(*place).detach().abs()
        torch.testing.assert_close(noise.z(*place), expected, rtol=1e-6, atol=0)


def walk_state(history, rollout, **changes):
    amplitude = next(a for first, a in reversed(history) if first <= rollout)
    return state(mode="accumulate", rollout=rollout, sigma=amplitude, history=history, **changes)


def test_accumulated_noise_is_the_sum_of_all_draws_however_it_is_made(model):
    history = ((0, 0.0), (2, 0.3), (4, 0.1))
    last = walk_state(history, 6)
    total = {}
    for rollout in range(2, 7):
        amplitude = 0.3 if rollout < 4 else 0.1
        draw = state(rollout=rollout, sigma=amplitude).materialize(model)
        total = {place: total[place] + draw.z(*place) if total else draw.z(*place) for place in draw.places()}
    again = last.materialize(model)
    assert all(torch.equal(again.z(*place), total[place]) for place in again.places())
    before = walk_state(history[:3], 5).materialize(model)
    stored = last.materialize(model, earlier=before.values)
    assert all(torch.equal(stored.z(*place), total[place]) for place in again.places())
    assert last.displacement == pytest.approx((2 * 0.3**2 + 3 * 0.1**2) ** 0.5)


def test_variance_of_accumulated_noise_is_the_sum_of_squares(model):
    history = ((0, 0.3), (2, 0.1))
    values = torch.cat(
        [torch.cat(list(walk_state(history, 5, seed=seed).materialize(model).values.values())) for seed in range(15)]
    )
    expected = 2 * 0.3**2 + 4 * 0.1**2
    assert values.var() == pytest.approx(expected, rel=4 * (2 / values.numel()) ** 0.5)


def test_accumulated_noise_stays_when_the_schedule_is_silent(model):
    quiet_now = walk_state(((0, 0.2), (2, 0.0)), 3)
    assert not quiet_now.silent
    earlier = walk_state(((0, 0.2),), 1).materialize(model)
    noise = quiet_now.materialize(model)
    assert all(torch.equal(noise.z(*place), earlier.z(*place)) for place in earlier.places())
    assert walk_state(((0, 0.0),), 3).silent


@pytest.mark.parametrize(
    "change",
    [
        {"scope": "token", "prompt": "clean", "group_size": 8},
        {"magnitude": "kl", "kl_target": 0.01, "sharing": "independent"},
        {"magnitude": "sensitivity", "site_scales": (0.5, 2.0), "factor": 1.5},
        {"mode": "accumulate", "history": ((0, 0.0), (3, 0.25))},
    ],
)
def test_a_state_survives_plain_values(change):
    made = state(**change)
    assert NoiseState.from_dict(made.to_dict()) == made
    assert NoiseState.from_dict({**made.to_dict(), "key": 3}) == made


def test_expected_share_of_large_noise_agrees_with_draws(model):
    expected = z_over_w(state(scope="response", sigma=0.4).materialize(model), model, 0.5)
    drawn = [z_over_w(state(rollout=r, sigma=0.4).materialize(model), model, 0.5) for r in range(60)]
    assert sum(drawn) / len(drawn) == pytest.approx(expected, abs=0.01)
    assert 0.05 < expected < 0.9


def test_pack_helper_and_contexts_agree_on_positions():
    _, plain = pack(random_tokens(LENGTHS))
    assert torch.equal(plain.positions_T, context().positions_T)

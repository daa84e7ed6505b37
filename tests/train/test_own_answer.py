"""The canary on a step's own answer: silent in sound runs, and it names what an engine or a trainer leaves out, at any update."""

import copy
from dataclasses import replace

import pytest
import torch
from rollout_builders import load_tiny, make_prompts, shift_adapters, write_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from qerl.config.load import load_config
from qerl.errors import TrainingError
from qerl.model.aqn import NoiseState
from qerl.model.tokenizer import load_tokenizer
from qerl.records import Rollout, SamplingSpec
from qerl.rollout.engine import Engine
from qerl.train.diagnostics import own_answer
from qerl.train.diagnostics.own_answer import OwnAnswer, choose_answer, measure_move
from qerl.train.session import open_session

PROMPTS = make_prompts([6, 4, 9])
SAMPLING = SamplingSpec(temperature=1.0, max_new_tokens=12, seed=0, rollout=3)
NOISE = NoiseState(seed=0, rollout=3, stage=1, sigma=0.05, sites=("attn_norm", "mlp_norm"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.fixture
def model(folder):
    return load_tiny(folder)


def sample(model, folder, *, noise=None, adapters=True):
    return answered(Engine(model, load_tokenizer(folder)), PROMPTS, SAMPLING, noise=noise, adapters=adapters)


def answered(engine, prompts, sampling, **arguments):
    completions, stats = engine.generate(prompts, sampling, group_size=4, **arguments)
    return Rollout(
        index=3,
        group_size=4,
        completions=completions,
        sampling=sampling,
        policy=None,
        engine=engine.name,
        kernels={},
        cache_state="empty",
        stats=stats,
    )


def read(model, rollout, noise=None, *settings):
    found = OwnAnswer(load_config(None, [*settings]), model, rollout, noise)
    found.launch()
    found.read()
    return found.metrics


@pytest.mark.parametrize("scope", ["rollout", "response", "token"])
@pytest.mark.parametrize("prompt", ["noisy", "clean"])
def test_a_sound_engine_makes_the_whole_move_of_adapters_and_of_noise(model, folder, scope, prompt):
    noise = replace(NOISE, scope=scope, prompt=prompt).materialize(model)
    metrics = read(model, sample(model, folder, noise=noise), noise)
    assert metrics["canary/own/engine_difference"] < 1e-5
    for cause in ("adapters", "noise"):
        assert metrics[f"canary/own/{cause}_effect"] > 1e-3
        assert metrics[f"canary/own/{cause}_share"] == pytest.approx(1.0, abs=1e-3)


def test_a_token_that_follows_from_a_clean_prompt_alone_need_not_move(model, folder):
    noise = replace(NOISE, prompt="clean").materialize(model)
    engine = Engine(model, load_tokenizer(folder))
    rollout = answered(engine, PROMPTS, replace(SAMPLING, max_new_tokens=1), noise=noise)
    assert read(model, rollout, noise)["canary/own/noise_effect"] == 0.0


def test_without_noise_and_with_fresh_adapters_there_is_nothing_to_leave_out(model, folder):
    shift_adapters(model, -0.1)
    rollout = sample(model, folder)
    metrics = read(model, rollout)
    # -0.1 + 0.1 is not 0 to the bit: B of 1e-9 are adapters, whose effect is below what anything is concluded from.
    assert "canary/own/adapters_share" not in metrics and metrics["canary/own/engine_difference"] < 1e-5
    plain = load_tiny(folder, adapters=False)
    assert read(plain, rollout).keys() == {"canary/own/engine_difference"}


@pytest.fixture
def loose(monkeypatch):
    """Engine and trainer may disagree as far as they like: what is left are the shares, which see faults below the tolerance."""
    monkeypatch.setattr(own_answer, "check_agreement", lambda *args: None)


@pytest.mark.usefixtures("loose")
def test_an_engine_that_ignores_the_adapters_is_named_below_the_tolerance_too(model, folder):
    with pytest.raises(TrainingError, match="the engine ignores the adapters") as caught:
        read(model, sample(model, folder, adapters=False))
    assert "the engine's by 0 % of that" in str(caught.value)


@pytest.mark.usefixtures("loose")
@pytest.mark.parametrize("seen", [None, replace(NOISE, rollout=2)], ids=["none", "the key of the rollout before"])
def test_an_engine_with_other_noise_is_named(model, folder, seen):
    rollout = sample(model, folder, noise=None if seen is None else seen.materialize(model))
    with pytest.raises(TrainingError, match="the engine ignores the noise"):
        read(model, rollout, NOISE.materialize(model))


@pytest.mark.usefixtures("loose")
def test_a_doubt_is_settled_by_all_answers(model, folder, monkeypatch):
    """Log-probs of one answer that are wrong are no ignored adapters: the others have them."""
    rollout = sample(model, folder)
    config, scores = load_config(None, []), {}

    class Keeping(OwnAnswer):
        def _score(self, left_out, *rest):
            scores[left_out] = super()._score(left_out, *rest)
            return scores[left_out]

    Keeping(config, model, rollout, None).launch()
    chosen = choose_answer(rollout.completions, own_answer.TOKENS[torch.float32])
    base = tuple(scores["adapters"].tolist())
    wrong = tuple(
        replace(one, behavior_logprobs=base + one.behavior_logprobs[len(base) :])
        if one.sample_key == chosen.sample_key
        else one
        for one in rollout.completions
    )
    metrics = read(model, replace(rollout, completions=wrong))
    assert metrics["canary/own/adapters_share"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("seed", range(12))
def test_passes_that_differ_by_their_rounding_alone_are_no_fault(model, folder, seed):
    """Adapters of a first update change what is rounded and little else: the trainer's passes then differ by rounding, of which a sound engine has
    its own."""
    rollout, generator = sample(model, folder), torch.Generator().manual_seed(seed)
    sizes = {"": 2.5e-5, "adapters": 1.25e-5}

    class Rounding(OwnAnswer):
        def _score(self, left_out, batch, context):
            normal, scale = torch.randn(2, len(batch.targets_N), generator=generator)
            return batch.behavior_logprobs_N + normal * scale.abs() * sizes[left_out]

    found = Rounding(load_config(None, []), model, rollout, None)
    found.read()
    assert found.metrics["canary/own/adapters_effect"] > 3e-6 and "canary/own/adapters_share" not in found.metrics


def test_one_answer_in_which_nothing_shows_is_no_deaf_trainer(model, folder):
    """Small adapters may leave every rounded number of a few tokens as it was."""

    class Few(OwnAnswer):
        def _score(self, left_out, batch, context):
            alone = batch.num_sequences == 1
            return super()._score("" if alone else left_out, batch, context)

    found = Few(load_config(None, []), model, sample(model, folder), None)
    found.read()
    assert found.metrics["canary/own/adapters_effect"] == 0.0


def test_one_answer_of_unlikely_tokens_is_no_disagreement(model, folder):
    rollout = sample(model, folder)
    chosen = choose_answer(rollout.completions, own_answer.TOKENS[torch.float32])
    off = [
        replace(one, behavior_logprobs=tuple(p + 2e-3 for p in one.behavior_logprobs))
        if one.sample_key == chosen.sample_key
        else one
        for one in rollout.completions
    ]
    assert read(model, replace(rollout, completions=tuple(off)))["canary/own/engine_difference"] > 1e-3


def test_an_engine_that_disagrees_is_found_at_once(model, folder):
    old = copy.deepcopy(model)
    shift_adapters(model, 0.1)
    with pytest.raises(TrainingError, match="engine and trainer disagree"):
        read(model, sample(old, folder))


@pytest.mark.usefixtures("loose")
@pytest.mark.parametrize("cause", ["adapters", "noise"])
def test_a_trainer_without_them_is_named(model, folder, monkeypatch, cause):
    noise = NOISE.materialize(model)
    rollout = sample(model, folder, noise=noise)
    forward = type(model).forward

    def deaf(self, *args, noise=None, adapters=True, **kwargs):
        heard = {"noise": noise, "adapters": adapters} | {cause: None if cause == "noise" else False}
        return forward(self, *args, **heard, **kwargs)

    monkeypatch.setattr(type(model), "forward", deaf)
    with pytest.raises(TrainingError, match=f"the trainer's log-probs do not change with the {cause}"):
        read(model, rollout, noise)


def test_numbers_that_are_not_finite_are_left_to_the_update(model, folder):
    rollout = sample(model, folder)
    model.final_norm.data.fill_(torch.nan)
    assert read(model, rollout) == {}


def test_the_share_by_hand():
    now, without = torch.tensor([-1.0, -2.0, -3.0]).double(), torch.tensor([-1.5, -2.5, -2.0]).double()
    assert measure_move(now, now, without, 1e-2).share == 1.0
    assert measure_move(without, now, without, 1e-2).share == 0.0
    found = measure_move((now + without) / 2, now, without, 1e-2)
    assert found.share == 0.5 and found.effect == pytest.approx(2 / 3)
    assert found.standing == pytest.approx(2 / 3 * 3**0.5 / 1e-2)
    # One token that is off by 100 nats counts for at most three times its own move, up, and once, down.
    off = now + torch.tensor([0.0, 0.0, -100.0]).double()
    assert measure_move(off, now, without, 1e-2).share == pytest.approx((0.5 + 0.5 + 3.0) / 2)
    assert measure_move(2 * now - off, now, without, 1e-2).share == pytest.approx((0.5 + 0.5 - 1.0) / 2)
    assert measure_move(off, now, now, 1e-2).share == 0.0


def test_rounding_alone_is_no_doubt_and_a_real_fault_is_one():
    """Heavy-tailed rounding of 1e-2 a token over 128 tokens: sound engines keep their share, deaf ones have none, at the least move
    that anything is concluded from."""
    generator = torch.Generator().manual_seed(0)

    def rounding():
        normal, scale = (torch.randn(128, generator=generator, dtype=torch.float64) for _ in range(2))
        return normal * scale.abs() * 0.0125

    shares = {True: [], False: []}
    for _ in range(300):
        without = -torch.rand(128, generator=generator, dtype=torch.float64) * 3
        move = torch.randn(128, generator=generator, dtype=torch.float64)
        move *= own_answer.SURE_FROM * 1e-2 / 128**0.5 / move.abs().mean()
        for heard, engine in ((True, without + move), (False, without)):
            found = measure_move(engine + rounding(), without + move, without, 1e-2)
            assert found.standing == pytest.approx(own_answer.SURE_FROM)
            shares[heard].append(found.share)
    assert min(shares[True]) > own_answer.LEAST_SHARE > max(shares[False])


def test_the_answer_is_long_enough_of_the_shortest_prompt_and_the_first(model, folder):
    completions = sample(model, folder).completions

    def made(prompt, answer, key):
        one = completions[0]
        return replace(
            one,
            prompt=PROMPTS[prompt],
            sample_key=key,
            token_ids=(7,) * answer,
            behavior_logprobs=(-1.0,) * answer,
            sampler_logprobs=(-1.0,) * answer,
        )

    many = [made(1, 3, 0), made(0, 9, 1), made(1, 8, 2), made(1, 12, 3)]
    chosen = choose_answer(many, 8)
    assert chosen.sample_key == 2 and len(chosen.token_ids) == 8
    assert choose_answer(many, 100).sample_key == 3
    assert len(choose_answer(many[:1], 8).token_ids) == 3


class Waits(TorchDispatchMode):
    """Notes operations for which a host would wait for its GPU: numbers read, sizes that depend on values, tensors made of lists."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if any(name in str(operation) for name in ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh")):
            self.found.append(str(operation))
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("scope", [None, "rollout", "group", "response", "token"])
def test_nothing_that_the_passes_do_waits_for_a_device(model, folder, scope):
    """Of the model's code, on the CPU; the test below has the kernels' wrappers too."""
    noise = None if scope is None else replace(NOISE, scope=scope, prompt="clean").materialize(model)
    rollout, config = sample(model, folder, noise=noise), load_config(None, [])
    OwnAnswer(config, model, rollout, noise).launch()  # as the learning pass: what is made once is there
    again = OwnAnswer(config, model, rollout, noise)
    with Waits() as waits:
        again.launch()
    assert waits.found == []
    with Waits() as waits:
        again.read()
    assert waits.found


@pytest.mark.gpu
@pytest.mark.parametrize("noise", [None, NOISE, replace(NOISE, scope="response"), replace(NOISE, prompt="clean")])
def test_on_a_gpu_the_passes_are_told_without_waiting(noise):
    """Else they would not be hidden behind the gradient that they are told after."""
    settings = ["model.path=demo", "model.device=cuda", "quant.format=nvfp4", "lora.rank=8"]
    config = load_config(None, [*settings, "rollout.max_prompt_tokens=8", "rollout.max_new_tokens=32"])
    session = open_session(config)
    shift_adapters(session.model, 0.05)
    drawn = None if noise is None else noise.materialize(session.model)
    prompts = [replace(prompt, token_ids=(5, 6, 7)) for prompt in PROMPTS]
    rollout = answered(session.engine, prompts, replace(SAMPLING, max_new_tokens=32), noise=drawn)
    for turn in range(2):
        found = OwnAnswer(config, session.model, rollout, drawn)
        # What is made once waits (kernels, divisors of weights, words of noise): the learning pass has made it before.
        torch.cuda.set_sync_debug_mode("error" if turn else "default")
        try:
            found.launch()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found.read()
        assert found.metrics["canary/own/engine_difference"] < 0.05

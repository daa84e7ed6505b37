"""What the engine generates, against whole passes of the same model: logits, log-probs, stops, and batch invariance."""

import dataclasses
import math

import pytest
import torch
from rollout_builders import (
    EOS_IDS,
    MAX_POSITIONS,
    VOCABULARY,
    full_logits,
    load_tiny,
    make_prompts,
    shift_adapters,
    teacher_forced,
    write_checkpoint,
)
from transformers import AutoModelForCausalLM

from qerl.errors import DataError, TrainingError
from qerl.model.aqn import NoiseState
from qerl.model.attention import PackedSequences
from qerl.model.checkpoint import norm_hash
from qerl.model.tokenizer import load_tokenizer
from qerl.records import SamplingSpec
from qerl.rollout import engine as engine_module
from qerl.rollout import workspace
from qerl.rollout.call import Call
from qerl.rollout.engine import Engine
from qerl.rollout.sampler import choose

RAGGED = (5, 1, 17, 2, 9)
"""Prompt lengths of most tests: ragged, with a prompt of one token (nothing to prefill)."""

WHOLE_PASS_TOLERANCE = 1e-4
"""float32 logits and log-probs, one token at a time against a whole pass; measured: 4e-6."""

BFLOAT16_MEAN_TOLERANCE = 0.01
"""bfloat16 mean |log-prob gap| to a whole pass: 8 bits of mantissa, rounded in another order; measured: 0.0018."""

BATCH_TOLERANCE = 1e-5
"""float32 log-probs of an answer in different batches; measured: 3e-6."""


@pytest.fixture(scope="module")
def tokenizer(qwen2_folder):
    return load_tokenizer(qwen2_folder)


@pytest.fixture
def model(qwen2_folder):
    return load_tiny(qwen2_folder)


def without_eos(tokenizer):
    return with_eos(tokenizer, (VOCABULARY + 1,))


def with_eos(tokenizer, eos_ids):
    return type(tokenizer)(tokenizer.inner, eos_ids, "")


def make_noise(model, sigma=0.2, rollout=0):
    sites = ("attn_norm", "mlp_norm", "final_norm")
    return NoiseState(seed=1, rollout=rollout, stage=1, sigma=sigma, sites=sites).materialize(model)


def tokens_of(completions):
    return [completion.token_ids for completion in completions]


# The policy of the answers


@pytest.mark.parametrize("rows", [3, 64])
def test_logits_equal_a_whole_pass_at_every_step_of_a_ragged_batch(model, tokenizer, monkeypatch, rows):
    recorded = {}

    def recording_choose(logits_BV, *arguments):
        (call,) = calls
        for row, sequence in enumerate(call.scheduler.running):
            recorded[sequence.index, int(call.workspace.state.count_R[row])] = logits_BV[row].clone()
        return choose(logits_BV, *arguments)

    class RecordedCall(Call):
        def __init__(self, *arguments, **settings):
            super().__init__(*arguments, **settings)
            calls.append(self)

    calls = []
    monkeypatch.setattr(workspace, "choose", recording_choose)
    monkeypatch.setattr(engine_module, "Call", RecordedCall)
    noise = make_noise(model)
    engine = Engine(model, tokenizer, max_num_seqs=rows, prefill_tokens=12)
    completions, _ = engine.generate(make_prompts(RAGGED), SamplingSpec(max_new_tokens=20), group_size=4, noise=noise)
    assert len({len(completion.token_ids) for completion in completions}) > 4, "the batch should be ragged"
    assert len(recorded) == sum(len(completion.token_ids) for completion in completions)
    worst = 0.0
    for index, completion in enumerate(completions):
        prompt = completion.prompt.token_ids
        whole = full_logits(model, [*prompt, *completion.token_ids], noise=noise)
        for step in range(len(completion.token_ids)):
            worst = max(worst, float((recorded[index, step] - whole[len(prompt) - 1 + step]).abs().max()))
    assert worst <= WHOLE_PASS_TOLERANCE


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_behavior_logprobs_equal_a_teacher_forced_pass_with_noise_and_adapters(
    qwen2_folder, tokenizer, quantized, temperature
):
    model = load_tiny(qwen2_folder, quantized=quantized)
    noise = make_noise(model)
    spec = SamplingSpec(max_new_tokens=16, temperature=temperature)
    completions, _ = Engine(model, tokenizer, max_num_seqs=7).generate(
        make_prompts(RAGGED), spec, group_size=3, noise=noise
    )
    for completion in completions:
        expected = teacher_forced(model, completion, temperature, noise=noise)
        assert completion.behavior_logprobs == pytest.approx(expected.tolist(), abs=WHOLE_PASS_TOLERANCE)
        assert completion.sampler_logprobs == completion.behavior_logprobs


def test_bfloat16_logprobs_stay_close_to_a_teacher_forced_pass(qwen2_folder, tokenizer):
    model = load_tiny(qwen2_folder, dtype=torch.bfloat16)
    completions, _ = Engine(model, tokenizer).generate(make_prompts(RAGGED * 4), SamplingSpec(max_new_tokens=16))
    gaps = [
        (torch.tensor(completion.behavior_logprobs) - teacher_forced(model, completion, 1.0)).abs()
        for completion in completions
    ]
    assert torch.cat(gaps).mean() < BFLOAT16_MEAN_TOLERANCE


def test_sampler_logprobs_are_renormalized_over_the_truncated_support(model, tokenizer):
    spec = SamplingSpec(max_new_tokens=12, top_k=4, temperature=1.2)
    completions, _ = Engine(model, tokenizer).generate(make_prompts(RAGGED), spec, group_size=2)
    for completion in completions:
        prompt = completion.prompt.token_ids
        logits = full_logits(model, [*prompt, *completion.token_ids])[len(prompt) - 1 : -1].double() / 1.2
        best = logits.topk(4, dim=-1)
        for step, token in enumerate(completion.token_ids):
            place = best.indices[step].tolist().index(token)
            expected = torch.log_softmax(best.values[step], -1)[place].item()
            assert completion.sampler_logprobs[step] == pytest.approx(expected, abs=WHOLE_PASS_TOLERANCE)
            assert completion.behavior_logprobs[step] < completion.sampler_logprobs[step]


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "qwen3", "mistral"])
def test_greedy_answers_equal_transformers_generate_token_for_token(tmp_path, architecture):
    folder = write_checkpoint(tmp_path, architecture, seed=3)
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    engine = Engine(load_tiny(folder, adapters=False), load_tokenizer(folder), max_num_seqs=4)
    prompts = make_prompts((1, 3, 8, 20, 4, 11, 6))
    completions, _ = engine.generate(prompts, SamplingSpec(temperature=0.0, max_new_tokens=24))
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([prompt.token_ids])
        expected = peer.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, pad_token_id=0
        )[0, len(prompt.token_ids) :].tolist()
        assert list(completion.token_ids) == expected
        assert set(completion.sampler_logprobs) == {0.0}


def test_greedy_logprobs_are_those_of_temperature_one(model, tokenizer):
    completions, _ = Engine(model, tokenizer).generate(
        make_prompts(RAGGED), SamplingSpec(temperature=0.0, max_new_tokens=8)
    )
    for completion in completions:
        expected = teacher_forced(model, completion, 1.0)
        assert completion.behavior_logprobs == pytest.approx(expected.tolist(), abs=WHOLE_PASS_TOLERANCE)


# Independence of the batch


@pytest.mark.parametrize("spec", [SamplingSpec(max_new_tokens=18, seed=4), SamplingSpec(max_new_tokens=18, top_p=0.9)])
def test_an_answer_is_the_same_alone_and_in_any_batch(model, tokenizer, spec):
    prompts, group_size = make_prompts(RAGGED), 5
    together, _ = Engine(model, tokenizer).generate(prompts, spec, group_size=group_size)
    for rows, prefill_tokens in ((1, 1), (2, 8192), (3, 10), (8, 20)):
        engine = Engine(model, tokenizer, max_num_seqs=rows, prefill_tokens=prefill_tokens)
        again, stats = engine.generate(prompts, spec, group_size=group_size)
        assert_same_answers(again, together)
        assert stats["peak_rows"] == rows
    for index in (0, 7, 24):
        alone, _ = Engine(model, tokenizer).generate([prompts[index // group_size]], spec, first_sample_key=index)
        assert_same_answers(alone, [together[index]])


def assert_same_answers(found, expected):
    assert tokens_of(found) == tokens_of(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.sample_key == other.sample_key
        assert one.behavior_logprobs == pytest.approx(other.behavior_logprobs, abs=BATCH_TOLERANCE)
        assert one.sampler_logprobs == pytest.approx(other.sampler_logprobs, abs=BATCH_TOLERANCE)


def test_the_same_call_gives_the_same_bits(model, tokenizer):
    engine = Engine(model, tokenizer, max_num_seqs=6)
    first, _ = engine.generate(make_prompts(RAGGED), SamplingSpec(max_new_tokens=12), group_size=3)
    second, _ = engine.generate(make_prompts(RAGGED), SamplingSpec(max_new_tokens=12), group_size=3)
    assert first == second


def test_answers_are_prompt_major_and_members_of_a_group_differ(model, tokenizer):
    prompts = make_prompts(RAGGED)
    completions, _ = Engine(model, tokenizer).generate(
        [*prompts, prompts[0]], SamplingSpec(max_new_tokens=10), group_size=3, first_sample_key=100
    )
    assert [completion.prompt.id for completion in completions] == [
        prompt.id for prompt in [*prompts, prompts[0]] for _ in range(3)
    ]
    assert [completion.sample_key for completion in completions] == list(range(100, 118))
    for start in range(0, 18, 3):
        assert len(set(tokens_of(completions[start : start + 3]))) == 3
    assert not set(tokens_of(completions[:3])) & set(tokens_of(completions[15:])), "a prompt drawn twice"


def test_another_rollout_stream_or_seed_gives_other_answers(model, tokenizer):
    engine, prompts = Engine(model, tokenizer), make_prompts(RAGGED)
    base = SamplingSpec(max_new_tokens=10)
    answers = [
        tokens_of(engine.generate(prompts, dataclasses.replace(base, **change))[0])
        for change in ({}, {"rollout": 1}, {"stream": "eval"}, {"seed": 1})
    ]
    assert len({tuple(answer) for answer in answers}) == 4


# The trainer's own tensors


@pytest.mark.parametrize("paged", [False, True])
def test_a_changed_adapter_is_visible_in_the_next_call(model, tokenizer, paged):
    """Also where the cache is kept: its pages still hold what the adapters before made of the same prompts."""
    engine, spec, prompts = Engine(model, tokenizer, paged=paged), SamplingSpec(max_new_tokens=10), make_prompts(RAGGED)
    first, _ = engine.generate(prompts, spec)
    kept = engine._workspace
    assert (kept is not None) == paged
    shift_adapters(model, 0.3)
    second, _ = engine.generate(prompts, spec)
    assert engine._workspace is kept
    assert tokens_of(first) != tokens_of(second)
    for completion in second:
        expected = teacher_forced(model, completion, 1.0)
        assert completion.behavior_logprobs == pytest.approx(expected.tolist(), abs=WHOLE_PASS_TOLERANCE)


def test_without_adapters_the_base_model_answers(model, qwen2_folder, tokenizer):
    spec, prompts = SamplingSpec(max_new_tokens=10), make_prompts(RAGGED)
    off, _ = Engine(model, tokenizer).generate(prompts, spec, adapters=False)
    base, _ = Engine(load_tiny(qwen2_folder, adapters=False), tokenizer).generate(prompts, spec)
    on, _ = Engine(model, tokenizer).generate(prompts, spec)
    assert off == base
    assert tokens_of(on) != tokens_of(off)


def test_noise_is_visible_keyed_and_leaves_the_clean_scales_untouched(model, tokenizer):
    engine, spec, prompts = Engine(model, tokenizer), SamplingSpec(max_new_tokens=10), make_prompts(RAGGED)
    before = norm_hash(model)
    clean, _ = engine.generate(prompts, spec)
    noisy, _ = engine.generate(prompts, spec, noise=make_noise(model, rollout=0))
    other, _ = engine.generate(prompts, spec, noise=make_noise(model, rollout=1))
    silent, _ = engine.generate(prompts, spec, noise=make_noise(model, sigma=0.0))
    assert len({tuple(tokens_of(answers)) for answers in (clean, noisy, other)}) == 3
    assert silent == clean, "sigma 0 must be bit-identical to no noise"
    assert norm_hash(model) == before
    assert engine.generate(prompts, spec)[0] == clean


def test_training_goes_on_after_generation(model, tokenizer):
    Engine(model, tokenizer).generate(make_prompts(RAGGED), SamplingSpec(max_new_tokens=4))
    hidden = model(torch.tensor([7, 8, 9]), PackedSequences(torch.tensor([0, 3])))
    model.logits(hidden).sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.trainable_parameters().values())


# Where answers end


def test_every_eos_id_ends_an_answer_and_belongs_to_it(model, tokenizer):
    prompts = make_prompts(RAGGED)
    spec = SamplingSpec(max_new_tokens=30, temperature=1.5)
    free, _ = Engine(model, without_eos(tokenizer)).generate(prompts, spec, group_size=24)
    assert {len(completion.token_ids) for completion in free} == {30}
    assert {completion.stop_reason for completion in free} == {"length"}
    stopped, _ = Engine(model, tokenizer).generate(prompts, spec, group_size=24)
    last_tokens = set()
    for whole, cut in zip(free, stopped, strict=True):
        end = next((i + 1 for i, token in enumerate(whole.token_ids) if token in EOS_IDS), 30)
        assert cut.token_ids == whole.token_ids[:end]
        assert cut.stop_reason == ("stop" if cut.token_ids[-1] in EOS_IDS else "length")
        assert len(cut.behavior_logprobs) == len(cut.sampler_logprobs) == len(cut.token_ids)
        last_tokens.add(cut.token_ids[-1])
    assert last_tokens >= set(EOS_IDS)


def test_an_eos_at_the_last_allowed_token_is_a_stop(model, tokenizer):
    (prompt,), spec = make_prompts([6]), SamplingSpec(max_new_tokens=5)
    ((whole,), _) = Engine(model, without_eos(tokenizer)).generate([prompt], spec)
    assert whole.token_ids[4] not in whole.token_ids[:4]
    ((cut,), _) = Engine(model, with_eos(tokenizer, (0, whole.token_ids[4]))).generate([prompt], spec)
    assert cut.token_ids == whole.token_ids
    assert cut.stop_reason == "stop"


def test_text_leaves_special_tokens_out(model, tokenizer):
    completions, _ = Engine(model, tokenizer).generate(make_prompts([4] * 60), SamplingSpec(max_new_tokens=40))
    ended = [completion for completion in completions if completion.token_ids[-1] == 2]
    assert ended
    for completion in completions:
        assert completion.text.replace(" ", "") == "".join(f"w{token}" for token in completion.token_ids if token > 2)


@pytest.mark.parametrize("group_size", [1, 4])
def test_one_token_answers(model, tokenizer, group_size):
    prompts = make_prompts([1, MAX_POSITIONS - 1])
    completions, stats = Engine(model, tokenizer).generate(
        prompts, SamplingSpec(max_new_tokens=1), group_size=group_size
    )
    assert {len(completion.token_ids) for completion in completions} == {1}
    assert stats["decode_steps"] == 1
    for completion in completions:
        expected = teacher_forced(model, completion, 1.0).item()
        assert completion.behavior_logprobs[0] == pytest.approx(expected, abs=WHOLE_PASS_TOLERANCE)


def test_the_longest_sequence_of_the_model_can_be_filled(model, tokenizer):
    (prompt,) = make_prompts([MAX_POSITIONS - 10])
    ((completion,), _) = Engine(model, without_eos(tokenizer)).generate([prompt], SamplingSpec(max_new_tokens=10))
    assert len(completion.token_ids) == 10


# Refusals, counters, progress


def test_prompts_that_cannot_be_answered_are_refused_by_name(model, tokenizer):
    engine, spec = Engine(model, tokenizer), SamplingSpec(max_new_tokens=10)
    good, *bad = make_prompts([4, 0, MAX_POSITIONS - 9])
    foreign = dataclasses.replace(good, id="foreign", token_ids=(3, VOCABULARY))
    for prompt, message in ((bad[0], "p1 is empty"), (bad[1], "p2 is too long"), (foreign, "foreign holds a token")):
        with pytest.raises(DataError, match=message):
            engine.generate([good, prompt], spec)
    with pytest.raises(DataError, match="no prompts"):
        engine.generate([], spec)
    with pytest.raises(DataError, match="at most 12 in all"):
        Engine(model, tokenizer, max_model_len=12).generate([good], spec)


def test_logits_that_are_not_finite_stop_the_call_and_name_the_prompt(model, tokenizer):
    with torch.no_grad():
        model.final_norm[3] = math.nan
    with pytest.raises(TrainingError, match="not finite for an answer to prompt p0"):
        Engine(model, tokenizer).generate(make_prompts([3]), SamplingSpec(max_new_tokens=4))


def test_counters_and_progress_tell_what_was_done(model, tokenizer):
    calls = []
    engine = Engine(model, tokenizer, max_num_seqs=4)
    completions, stats = engine.generate(
        make_prompts(RAGGED),
        SamplingSpec(max_new_tokens=12),
        group_size=2,
        on_progress=lambda *call: calls.append(call),
    )
    tokens = sum(len(completion.token_ids) for completion in completions)
    assert stats["generated_tokens"] == tokens
    assert stats["prompt_tokens"] == sum(RAGGED)
    assert stats["peak_rows"] == 4
    assert (
        stats["kv_bytes"] == 2 * 2 * (4 + 1) * (17 + 12 - 1) * 2 * 12 * 4
    )  # layers, k and v, slots, L, heads, d, float32
    assert stats["refills"] >= 2
    assert max(len(c.token_ids) for c in completions) <= stats["decode_steps"] <= tokens
    assert 0 < stats["prefill_seconds"] + stats["decode_seconds"] <= stats["seconds"]
    assert stats["tokens_per_second"] == pytest.approx(tokens / stats["seconds"])
    assert all(isinstance(value, float) for value in stats.values())
    assert calls == sorted(calls)
    assert calls[-1] == (10, 10, tokens)

"""Row state: what is appended is what is harvested, through moves and late starts."""

import torch

from qerl.records import SamplingSpec
from qerl.rollout.sampler import Chosen, answer_uniforms
from qerl.rollout.sequence import UNIFORM_WINDOW, RowState, Sequence

CPU = torch.device("cpu")


def make_sequence(key, prompt_length=3):
    return Sequence(index=key, prompt_index=0, prompt_length=prompt_length, sample_key=key)


def step(state, tokens):
    tokens_B = torch.tensor(tokens)
    state.append(Chosen(tokens_B, -tokens_B.float(), -0.5 * tokens_B.float()))


def test_a_row_ends_at_any_eos_or_at_the_longest_answer():
    state = RowState(4, SamplingSpec(max_new_tokens=2), CPU)
    state.start([0, 1, 2, 3], [make_sequence(key) for key in range(4)], [9, 9, 9, 9])
    eos = torch.tensor([5, 6])
    assert state.finished(4, eos) == []
    step(state, [1, 5, 2, 6])
    assert state.finished(4, eos) == [1, 3]
    step(state, [1, 1, 5, 1])
    assert state.finished(4, eos) == [0, 1, 2, 3]


def test_answers_survive_moves_and_reuse_of_their_rows():
    state = RowState(3, SamplingSpec(max_new_tokens=4), CPU)
    state.start([0, 1, 2], [make_sequence(key, 3 + key) for key in range(3)], [70, 71, 72])
    assert state.last_token_R.tolist() == [70, 71, 72]
    assert state.length_R.tolist() == [2, 3, 4]
    step(state, [11, 12, 13])
    step(state, [21, 22, 23])
    first = state.harvest([0])[0]
    assert first.token_ids == [11, 21]
    assert first.behavior_logprobs == [-11.0, -21.0]
    assert first.sampler_logprobs == [-5.5, -10.5]
    state.move(torch.tensor([2]), torch.tensor([0]))
    assert state.length_R.tolist()[:2] == [6, 5]
    assert state.sample_key_R.tolist()[:2] == [2, 1]
    step(state, [33, 32])
    state.start([1], [make_sequence(8, 1)], [78])
    step(state, [43, 48])
    assert [answer.token_ids for answer in state.harvest([0, 1])] == [[13, 23, 33, 43], [48]]
    assert state.length_R.tolist()[:2] == [8, 1]


def test_random_numbers_follow_the_sample_through_windows_moves_and_late_starts():
    spec = SamplingSpec(seed=3, max_new_tokens=3 * UNIFORM_WINDOW)
    state = RowState(3, spec, CPU)
    state.start([0, 1], [make_sequence(10), make_sequence(11)], [1, 1])
    holders, counts = [10, 11], {10: 0, 11: 0, 12: 0}
    for index in range(2 * UNIFORM_WINDOW + 5):
        if index == UNIFORM_WINDOW // 2:
            state.start([2], [make_sequence(12)], [1])
            holders.append(12)
        if index == UNIFORM_WINDOW + 3:
            state.move(torch.tensor([2]), torch.tensor([0]))
            holders = [12, 11]
        uniforms = state.uniforms(len(holders)).tolist()
        for key, uniform in zip(holders, uniforms, strict=True):
            expected = answer_uniforms(spec, torch.tensor([key]), torch.tensor([counts[key]]), 1).item()
            assert uniform == expected
            counts[key] += 1
        step(state, [1] * len(holders))
    assert counts == {10: 35, 11: 69, 12: 53}

"""Row state: what is appended is what the host sees, through moves, late starts and rows that have ended."""

import torch

from qerl.kernels.philox import stream_key
from qerl.kernels.sampling import keyed_uniforms
from qerl.records import SamplingSpec
from qerl.rollout.row_state import UNIFORM_WINDOW, RowState
from qerl.rollout.sampler import Chosen, answer_uniforms
from qerl.rollout.sequence import Sequence

CPU = torch.device("cpu")
EOS = (5, 6)


def make_state(rows, spec, window=4):
    state = RowState(rows, window, EOS, CPU)
    state.begin(spec)
    return state


def make_sequence(key, prompt_length=3, answered=0):
    return Sequence(index=key, prompt_index=0, prompt_length=prompt_length, sample_key=key, answered=answered)


def step(state, tokens):
    tokens_B = torch.tensor(tokens)
    state.append(Chosen(tokens_B, -tokens_B.float(), -0.5 * tokens_B.float()))


def test_a_row_dies_at_any_eos_or_at_the_longest_answer_and_changes_no_more():
    state = make_state(4, SamplingSpec(max_new_tokens=2))
    state.start([0, 1, 2, 3], [make_sequence(key) for key in range(4)], [9, 9, 9, 9])
    step(state, [1, 5, 2, 6])
    assert state.alive_R.tolist() == [1, 0, 1, 0]
    step(state, [1, 1, 5, 1])
    assert not state.alive_R.any()
    step(state, [8, 8, 8, 8])
    tokens, logprobs = state.close_window(3, 4).read()
    assert tokens.tolist() == [[1, 5, 2, 6], [1, -1, 5, -1], [-1] * 4]
    assert logprobs[:, 1, 2].tolist() == [-5.0, -2.5]
    assert state.last_token_R.tolist() == [1, 5, 5, 6]
    assert state.length_R.tolist() == [4, 3, 4, 3]
    assert state.count_R.tolist() == [2, 1, 2, 1]


def test_tokens_survive_moves_and_reuse_of_rows_and_a_look_begins_a_new_window():
    state = make_state(3, SamplingSpec(max_new_tokens=4))
    state.start([0, 1, 2], [make_sequence(key, 3 + key) for key in range(3)], [70, 71, 72])
    assert state.last_token_R.tolist() == [70, 71, 72]
    assert state.length_R.tolist() == [2, 3, 4]
    step(state, [11, 12, 13])
    step(state, [21, 22, 23])
    tokens, logprobs = state.close_window(2, 3).read()
    assert tokens.tolist() == [[11, 12, 13], [21, 22, 23]]
    assert logprobs[0].tolist() == [[-11.0, -12.0, -13.0], [-21.0, -22.0, -23.0]]
    state.move(torch.tensor([2]), torch.tensor([0]))
    assert state.length_R.tolist()[:2] == [6, 5]
    assert state.sample_key_R.tolist()[:2] == [2, 1]
    step(state, [33, 32])
    state.start([1], [make_sequence(8, 1, answered=1)], [78])
    step(state, [43, 48])
    assert state.close_window(2, 2).read()[0].tolist() == [[33, 32], [43, 48]]
    assert state.length_R.tolist()[:2] == [8, 2]
    assert state.count_R.tolist()[:2] == [4, 2]
    assert state.alive_R.tolist()[:2] == [0, 1]


def test_random_numbers_follow_the_sample_through_windows_moves_and_late_starts():
    spec = SamplingSpec(seed=3, max_new_tokens=3 * UNIFORM_WINDOW)
    state = make_state(3, spec, window=200)
    state.start([0, 1], [make_sequence(10), make_sequence(11)], [1, 1])
    holders, counts = [10, 11], {10: 0, 11: 0, 12: 7}
    for index in range(2 * UNIFORM_WINDOW + 5):
        if index == UNIFORM_WINDOW // 2:
            state.start([2], [make_sequence(12, answered=7)], [1])
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
    assert counts == {10: 35, 11: 69, 12: 7 + 53}


def test_keys_in_device_memory_give_the_same_random_numbers():
    spec = SamplingSpec(seed=7, stream="eval_sample", rollout=11)
    state = make_state(2, spec)
    assert state.key_3.tolist() == [*stream_key(7, "eval_sample"), 11]
    keys, positions = torch.tensor([0, 5, 123456, 2**31]), torch.tensor([0, 1, 2047, 9])
    expected = answer_uniforms(spec, keys, positions, 1)[:, 0]
    assert torch.equal(keyed_uniforms(state.key_3, positions, keys), expected)


def test_no_random_numbers_are_drawn_when_greedy():
    state = make_state(2, SamplingSpec(temperature=0.0))
    assert state.uniforms(2) is None

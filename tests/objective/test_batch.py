from dataclasses import replace
from itertools import chain

import pytest
import torch
from builders import completion, group
from hypothesis import given
from hypothesis import strategies as st

from qerl.objective.batch import Sample, make_samples, pack, split_minibatches
from qerl.records import Outcome

CPU = torch.device("cpu")


def sample(prompt_length, logprobs, advantage=1.0, in_loss=True):
    return Sample(completion=completion(prompt_length, logprobs), advantage=advantage, in_loss=in_loss)


def test_layout_of_two_sequences_by_hand():
    (batch,) = pack([sample(3, [-0.1, -0.2]), sample(1, [-0.3], advantage=-2.0, in_loss=False)], 100, CPU)
    assert batch.tokens_T.tolist() == [1, 2, 3, 10, 11, 1, 10]
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert batch.cu_pieces_P1.tolist() == [0, 5, 7]
    assert batch.predictor_N.tolist() == [2, 3, 5]
    assert batch.targets_N.tolist() == [10, 11, 10]
    assert batch.sequence_N.tolist() == [0, 0, 1]
    torch.testing.assert_close(batch.behavior_logprobs_N, torch.tensor([-0.1, -0.2, -0.3]))
    assert batch.advantages_S.tolist() == [1.0, -2.0]
    assert batch.loss_mask_S.tolist() == [True, False]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=20), st.integers(18, 60))
def test_packing_keeps_every_sample_in_order_within_the_budget(lengths, budget):
    samples = [sample(p, [-0.1] * n) for p, n in lengths]
    batches = list(pack(samples, budget, CPU))
    assert all(batch.num_tokens <= budget for batch in batches)
    sizes = [size for batch in batches for size in batch.cu_pieces_P1.diff().tolist()]
    assert sizes == [p + n for p, n in lengths]
    for batch in batches:
        assert torch.equal(batch.tokens_T[batch.predictor_N + 1], batch.targets_N)


def test_layout_of_answers_that_share_a_prompt_by_hand():
    """A prompt of two with answers of two and one; the third sample's prompt is another."""
    items = [sample(2, [-0.1, -0.2]), sample(2, [-0.3]), sample(3, [-0.4])]
    (batch,) = pack(items, 100, CPU, prefix_key=lambda key: 0)
    assert batch.tokens_T.tolist() == [1, 2, 10, 11, 10, 1, 2, 3, 10]
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 2, 0, 1, 2, 3]
    assert batch.cu_pieces_P1.tolist() == [0, 2, 4, 5, 9]
    assert batch.predictor_N.tolist() == [1, 2, 1, 7]
    assert batch.targets_N.tolist() == [10, 11, 10, 10]
    assert batch.sequence_N.tolist() == [0, 0, 1, 2]
    assert (batch.prompt_lengths_S.tolist(), batch.answer_lengths_S.tolist()) == ([2, 2, 3], [2, 1, 1])
    shared = batch.shared
    assert shared.sequence_T.tolist() == [0, 0, 0, 0, 1, 2, 2, 2, 2]
    assert shared.keys.lengths == (2, 4, 3, 4)
    assert shared.repeats.source_U.tolist() == [0, 1, 0, 1, 2, 3, 0, 1, 4, 5, 6, 7, 8]
    assert shared.repeats.own_T.tolist() == [0, 1, 4, 5, 8, 9, 10, 11, 12]
    assert shared.repeats.prompt_R.tolist() == [0, 1]
    assert shared.repeats.copies_RC.tolist() == [[2, 6], [3, 7]] and bool(shared.repeats.real_RC.all())


@given(
    st.lists(st.tuples(st.integers(1, 3), st.lists(st.integers(1, 9), min_size=1, max_size=5)), min_size=1, max_size=6),
    st.integers(12, 40),
)
def test_shared_prompts_stand_once_a_pass_and_every_place_is_right(groups, budget):
    items = [sample(prompt, [-0.1] * n) for prompt, lengths in groups for n in lengths]
    batches = list(pack(items, budget, CPU, prefix_key=lambda key: 0))
    answers = [size for batch in batches for size in batch.answer_lengths_S.tolist()]
    assert answers == [n for _, lengths in groups for n in lengths]
    for batch in batches:
        assert batch.num_tokens <= budget
        # Neighbors with another prompt end a run, so tokens are those of the runs' prompts and of all answers.
        prompts = batch.prompt_lengths_S.tolist()
        runs = [n for i, n in enumerate(prompts) if i == 0 or prompts[i - 1] != n]
        assert batch.num_tokens == sum(runs) + int(batch.answer_lengths_S.sum())
        first = torch.cat([torch.tensor([True]), batch.sequence_N.diff() != 0])
        assert torch.equal(batch.tokens_T[batch.predictor_N[~first] + 1], batch.targets_N[~first])
        assert (batch.positions_T[batch.predictor_N[first]] == batch.prompt_lengths_S - 1).all()
        if batch.shared is None:
            continue
        repeats, bounds = batch.shared.repeats, batch.shared.keys.cu_keys_S1
        assert torch.equal(repeats.source_U[repeats.own_T], torch.arange(batch.num_tokens))
        positions = batch.positions_T[repeats.source_U]
        for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            assert positions[start:stop].tolist() == list(range(stop - start)), "every piece has all keys before it"
        copies = {
            int(place): int(token)
            for token, row, real in zip(repeats.prompt_R, repeats.copies_RC, repeats.real_RC, strict=True)
            for place in row[real]
        }
        assert all(int(repeats.source_U[place]) == token for place, token in copies.items())
        assert sorted([*copies, *repeats.own_T.tolist()]) == list(range(len(repeats.source_U)))


def test_answers_whose_noise_differs_in_the_prompt_do_not_share_it():
    items = [Sample(completion=replace(sample(2, [-0.1]).completion, sample_key=key), advantage=1.0, in_loss=True) for key in range(4)]  # fmt: skip
    (batch,) = pack(items, 100, CPU, prefix_key=lambda key: key)
    assert batch.shared is None and batch.num_tokens == 12
    (batch,) = pack(items, 100, CPU, prefix_key=lambda key: key // 2)
    assert batch.num_tokens == 2 * 2 + 4 and batch.shared.sequence_T.tolist() == [0, 0, 0, 1, 2, 2, 2, 3]


def test_minibatches_are_whole_groups_that_cover_the_rollout():
    groups = [[sample(2, [-0.1])] * 4 for _ in range(6)]
    parts = split_minibatches(groups, 3)
    assert [len(part) for part in parts] == [8, 8, 8]
    assert list(chain(*parts)) == list(chain(*groups))


def test_unscorable_and_masked_truncated_leave_the_loss():
    scored = group([Outcome.CORRECT, Outcome.TRUNCATED, Outcome.UNSCORABLE])
    values = [[1.0, -1.0, 0.0]]
    (kept,) = make_samples([scored], values, mask_truncated=False)
    (masked,) = make_samples([scored], values, mask_truncated=True)
    assert [s.in_loss for s in kept] == [True, True, False]
    assert [s.in_loss for s in masked] == [True, False, False]
    assert [s.advantage for s in masked] == [1.0, -1.0, 0.0]


@pytest.mark.parametrize(("groups", "count", "sizes"), [(3, 2, [1, 2]), (1, 2, [0, 1]), (0, 2, [0, 0]), (5, 4, [1, 1, 1, 2])])  # fmt: skip
def test_a_batch_cut_short_still_splits(groups, count, sizes):
    parts = split_minibatches([[sample(2, [-0.1])]] * groups, count)
    assert [len(part) for part in parts] == sizes

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
    assert batch.cu_seqlens_S1.tolist() == [0, 5, 7]
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
    sizes = [size for batch in batches for size in batch.cu_seqlens_S1.diff().tolist()]
    assert sizes == [p + n for p, n in lengths]
    for batch in batches:
        assert torch.equal(batch.tokens_T[batch.predictor_N + 1], batch.targets_N)


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

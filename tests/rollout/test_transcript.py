"""What sequences chose, put together from windows in which rows move, end, and stand empty."""

import numpy as np

from qerl.rollout.transcript import Transcript


def add(transcript, index, tokens):
    tokens_WB = np.array(tokens, dtype=np.int32)
    logprobs = np.stack([-tokens_WB, -0.5 * tokens_WB]).astype(np.float32)
    return transcript.add(np.array(index), tokens_WB, logprobs).tolist()


def test_tokens_follow_their_sequence_through_windows_and_rows():
    transcript = Transcript(3)
    # Sequence 2 in row 0, nothing in row 1 (named 0, not alive), sequence 1 in row 2, which ends after one token.
    assert add(transcript, [2, 0, 1], [[5, -1, 7], [6, -1, -1]]) == [2, 0, 1]
    # Sequence 0 begins in row 1; sequence 2 has moved there from row 0 later on.
    assert add(transcript, [2, 0], [[8, 9]]) == [1, 1]
    assert add(transcript, [0, 2], [[3, 4], [2, -1]]) == [2, 1]
    assert transcript.counts_S.tolist() == [3, 1, 4]
    assert transcript.tokens(2) == [5, 6, 8, 4]
    answers = list(transcript.answers())
    assert [answer.token_ids for answer in answers] == [[9, 3, 2], [7], [5, 6, 8, 4]]
    assert answers[2].behavior_logprobs == [-5.0, -6.0, -8.0, -4.0]
    assert answers[0].sampler_logprobs == [-4.5, -1.5, -1.0]


def test_a_sequence_that_chose_nothing_has_an_empty_answer():
    transcript = Transcript(2)
    assert transcript.tokens(1) == []
    add(transcript, [0], [[4]])
    assert [answer.token_ids for answer in transcript.answers()] == [[4], []]

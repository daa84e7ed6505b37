"""The scheduler by hand on small cases, and under any mix of lengths and limits."""

import random
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl.rollout.pages import PageBook
from qerl.rollout.scheduler import Scheduler
from qerl.rollout.sequence import Sequence


def make_sequences(prompt_lengths, group_size):
    return [
        Sequence(index=prompt * group_size + answer, prompt_index=prompt, prompt_length=length, sample_key=0)
        for prompt, length in enumerate(prompt_lengths)
        for answer in range(group_size)
    ]


def running(scheduler):
    return [sequence.index for sequence in scheduler.running]


def test_a_group_that_fits_is_prefilled_once_and_not_kept():
    scheduler = Scheduler(make_sequences([5, 7], 3), rows=6, prefill_tokens=100)
    [[first, second]] = scheduler.admit()
    assert (first.rows, second.rows) == ((0, 1, 2), (3, 4, 5))
    assert first.prefill
    assert not first.keep
    assert (first.prefill_tokens, second.prefill_tokens) == (4, 6)
    assert scheduler.admit() == []


def test_a_group_larger_than_the_rows_is_kept_until_all_have_started():
    scheduler = Scheduler(make_sequences([5, 7], 5), rows=2, prefill_tokens=100)
    seen = []
    while not scheduler.done:
        seen += [start for starts in scheduler.admit() for start in starts]
        assert scheduler.compact() == []
        scheduler.release(range(len(scheduler.running)))
    assert [(len(start.rows), start.prefill, start.keep) for start in seen] == [
        (2, True, True),
        (2, False, True),
        (1, False, False),
        (1, True, True),
        (2, False, True),
        (2, False, False),
    ]


def test_a_freed_row_goes_to_the_next_in_order_and_the_last_row_closes_a_gap():
    scheduler = Scheduler(make_sequences([3, 3, 3, 3, 3], 1), rows=4, prefill_tokens=100)
    scheduler.admit()
    assert [sequence.index for sequence in scheduler.release([1])] == [1]
    [[start]] = scheduler.admit()
    assert start.rows == (1,)
    assert scheduler.compact() == []
    assert running(scheduler) == [0, 4, 2, 3]
    scheduler.release([0, 3])
    assert scheduler.admit() == []
    assert scheduler.compact() == [(2, 0)]
    assert running(scheduler) == [2, 4]
    assert scheduler.refills == 1


def test_a_prefill_pass_stays_within_its_token_budget():
    scheduler = Scheduler(make_sequences([5, 5, 50, 5, 5, 1], 1), rows=10, prefill_tokens=8)
    passes = [[start.prefill_tokens for start in starts] for starts in scheduler.admit()]
    assert passes == [[4, 4], [49], [4, 4, 0]]


def test_many_rows_are_refilled_by_the_sixteenth_and_the_last_ones_at_once():
    scheduler = Scheduler(make_sequences([3] * 35, 1), rows=32, prefill_tokens=1000)
    scheduler.admit()
    scheduler.release([4])
    assert scheduler.admit() == []
    scheduler.compact()
    scheduler.release([5])
    assert [start.rows for start in scheduler.admit()[0]] == [(5,), (31,)]
    scheduler.release([9])
    assert [start.rows for start in scheduler.admit()[0]] == [(9,)]


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.integers(1, 6),
    st.integers(1, 40),
    st.integers(1, 60),
    st.randoms(use_true_random=False),
)
@settings(max_examples=200)
def test_any_mix_finishes_with_each_sequence_once_and_no_row_shared_or_lost(
    prompt_lengths, group_size, rows, prefill_tokens, rng: random.Random
):
    sequences = make_sequences(prompt_lengths, group_size)
    left = {sequence.index: rng.randint(1, 30) for sequence in sequences}
    scheduler = Scheduler(sequences, rows=rows, prefill_tokens=prefill_tokens)
    held: dict[int, int] = {}  # row -> sequence, kept apart from the scheduler's own books
    started, finished, spare, steps = [], [], None, 0
    while not scheduler.done:
        for starts in scheduler.admit():
            assert sum(start.prefill_tokens for start in starts) <= prefill_tokens or len(starts) == 1
            for start in starts:
                prompt = start.sequences[0].prompt_index
                assert {sequence.prompt_index for sequence in start.sequences} == {prompt}
                assert start.prefill == (spare != prompt)
                spare = prompt if start.keep else None
                for row, sequence in zip(start.rows, start.sequences, strict=True):
                    assert row not in held
                    assert row < rows
                    held[row] = sequence.index
                    started.append(sequence.index)
        for source, target in scheduler.compact():
            assert target not in held
            held[target] = held.pop(source)
        assert held == dict(enumerate(running(scheduler)))
        assert held, "sequences wait but none runs"
        for sequence in held.values():
            left[sequence] -= 1
        ended = sorted(row for row, sequence in held.items() if left[sequence] == 0)
        finished += [sequence.index for sequence in scheduler.release(ended)]
        for row in ended:
            del held[row]
        steps += 1
        assert steps <= 30 * len(sequences)
    assert started == [sequence.index for sequence in sequences]
    assert sorted(finished) == started
    assert not held


def test_gaps_stay_where_closing_them_makes_no_step_smaller():
    scheduler = Scheduler(make_sequences([3] * 4, 1), rows=4, prefill_tokens=100)
    scheduler.admit()
    scheduler.release([1])
    assert scheduler.compact(lambda rows: 1 if rows == 1 else 4) == []
    assert [sequence and sequence.index for sequence in scheduler.running] == [0, None, 2, 3]
    scheduler.release([0, 2])
    assert scheduler.compact(lambda rows: 1 if rows == 1 else 4) == [(3, 0)]
    assert running(scheduler) == [3]


class PagedRun:
    """A stand-in for the engine: sequences get random numbers of tokens, and every page is looked after from outside."""

    def __init__(self, sequences, *, rows, pages, page_tokens, prefill_tokens, window, rng):
        self.book = PageBook(pages=pages, page_tokens=page_tokens, rows=rows)
        self.scheduler = Scheduler(sequences, rows=rows, prefill_tokens=prefill_tokens, book=self.book)
        self.lengths = {sequence.index: rng.randint(1, 30) for sequence in sequences}
        self.answered = dict.fromkeys(self.lengths, 0)
        self.window, self.rng = window, rng
        self.finished: list[int] = []

    def stored(self, sequence, more=0):
        tokens = min(self.answered[sequence.index] + more, self.lengths[sequence.index])
        return sequence.prompt_length - 1 + tokens

    def check_pages(self):
        """Held and free pages are all pages; a page has one writer, and is shared only where it is full and of one prompt."""
        holders: dict[int, list] = {}
        for row, sequence in enumerate(self.scheduler.running):
            pages = self.book.rows[row]
            assert (sequence is None) == (not pages)
            if sequence is not None:
                assert len(pages) * self.book.page_tokens >= self.stored(sequence)
                for place, page in enumerate(pages):
                    holders.setdefault(page, []).append((sequence.prompt_index, place, sequence.prompt_length - 1))
        assert all(not pages for pages in self.book.rows[len(self.scheduler.running) :])
        for page, users in holders.items():
            assert page > 0
            if len(users) > 1:
                assert len(set(users)) == 1, "another prompt, or another place of it"
                assert (users[0][1] + 1) * self.book.page_tokens <= users[0][2], "a page that is still written to"
        assert len(holders.keys() | set(self.book.spare)) + self.book.free == self.book.total

    def round(self):
        scheduler = self.scheduler
        for starts in scheduler.admit():
            for start in starts:
                assert start.sequences[0].answered == 0 or len(start.sequences) == 1
        self.check_pages()
        scheduler.compact()
        wanted = np.array([0 if held is None else self.stored(held, self.window) for held in scheduler.running])
        fits, lost = scheduler.fits(wanted), scheduler.grow(wanted)
        assert not (fits and lost)
        for _, sequence in lost:
            scheduler.requeue(replace(sequence, answered=self.answered[sequence.index]))
        scheduler.compact()
        self.check_pages()
        assert scheduler.running, "sequences wait but none runs"
        for sequence in scheduler.running:
            self.answered[sequence.index] += self.rng.randint(1, self.window)
        ended = [
            row
            for row, sequence in enumerate(scheduler.running)
            if self.answered[sequence.index] >= self.lengths[sequence.index]
        ]
        self.finished += [sequence.index for sequence in scheduler.release(ended)]


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=10),
    st.integers(1, 6),
    st.integers(1, 40),
    st.integers(1, 8),
    st.integers(0, 40),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
@settings(max_examples=200)
def test_any_mix_ends_with_the_fewest_pages_or_with_more(
    prompt_lengths, group_size, rows, page_tokens, more, window, rng: random.Random
):
    sequences = make_sequences(prompt_lengths, group_size)
    longest = max(prompt_lengths) + 30 - 1
    pages = -(-longest // page_tokens) + 2 + more
    run = PagedRun(
        sequences, rows=rows, pages=pages, page_tokens=page_tokens, prefill_tokens=50, window=window, rng=rng
    )
    rounds = 0
    while not run.scheduler.done:
        run.round()
        rounds += 1
        assert rounds <= 31 * len(sequences), "no progress"
    assert sorted(run.finished) == [sequence.index for sequence in sequences]
    assert run.book.free + len(run.book.spare) == run.book.total

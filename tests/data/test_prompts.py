import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qerl.config.schema import DataConfig
from qerl.data.prompts import PromptSampler, build_prompts
from qerl.data.tasks import Row
from qerl.errors import ConfigError, DataError
from qerl.records import Prompt


class WordTokenizer:
    """One token a word; the chat is readable."""

    def render(self, messages, add_generation_prompt=True):
        assert add_generation_prompt
        return " ".join(f"<{message['role']}> {message['content']}" for message in messages) + " <assistant>"

    def encode(self, text):
        return [len(word) for word in text.split()]


def row(question="What is 1 + 1 ?", answer="2", **fields):
    return {"question": question, "answer": answer, **fields}


def build(*rows, limit=100, **settings):
    return build_prompts(rows, WordTokenizer(), DataConfig(**settings), limit)


def test_a_question_is_rendered_with_system_prompt_and_template():
    (prompt,), _ = build(
        row(id=7, level=3), system_prompt="Be brief.", prompt_template="Q: {question} {x} Put it in \\boxed{}."
    )
    assert prompt.text == "<system> Be brief. <user> Q: What is 1 + 1 ? {x} Put it in \\boxed{}. <assistant>"
    assert prompt.token_ids == tuple(len(word) for word in prompt.text.split())
    assert (prompt.id, prompt.question, prompt.answer) == ("7", "What is 1 + 1 ?", "2")
    assert prompt.row == {"question": "What is 1 + 1 ?", "answer": "2", "id": 7, "level": 3}


def test_no_system_message_is_added_by_default():
    (prompt,), _ = build(row())
    assert prompt.text == "<user> What is 1 + 1 ? <assistant>"


def test_chat_messages_keep_their_turns_and_the_template_wraps_the_last_user_turn():
    chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "1 + 1 ?"},
    ]
    before = json.dumps(chat)
    (prompt,), _ = build(row(chat), prompt_template="Q: {question}", system_prompt="S")
    assert prompt.text == "<system> S <user> Hi <assistant> Hello <user> Q: 1 + 1 ? <assistant>"
    assert prompt.question == "1 + 1 ?"
    assert json.dumps(chat) == before


def test_a_system_message_of_the_row_is_kept():
    chat = [{"role": "system", "content": "own"}, {"role": "user", "content": "x"}]
    (prompt,), _ = build(row(chat), system_prompt="other")
    assert prompt.text == "<system> own <user> x <assistant>"


def test_other_field_names_and_numeric_answers():
    (prompt,), _ = build({"problem": "x", "final": 12.5}, question_key="problem", answer_key="final")
    assert (prompt.question, prompt.answer) == ("x", "12.5")


def test_a_row_without_id_is_named_by_file_and_line():
    rows = [Row(row(), "/data/sums/train.jsonl:1"), Row(row(id="own"), "/data/sums/train.jsonl:2")]
    prompts, _ = build_prompts(rows, WordTokenizer(), DataConfig(), 100)
    assert [prompt.id for prompt in prompts] == ["train.jsonl:1", "own"]


def test_long_prompts_are_dropped_and_counted_and_the_limit_itself_is_kept():
    # <user>, the words and <assistant>.
    prompts, dropped = build(row("a b"), row("a b c"), row("a b c d e f"), limit=5)
    assert [prompt.question for prompt in prompts] == ["a b", "a b c"]
    assert (dropped.kept, dropped.too_long, dropped.longest) == (2, 1, 8)


def test_all_prompts_dropped_is_an_error_with_counts():
    with pytest.raises(DataError, match=r"2 of 2 are longer .* longest prompt 7 tokens"):
        build(row("a b c"), row("a b c d e"), limit=4)


@pytest.mark.parametrize(
    ("fields", "settings", "message"),
    [
        (
            {"questoin": "x", "answer": "1"},
            {},
            r"f\.jsonl:9: the row has no field 'question'.*data\.question_key=questoin",
        ),
        ({"question": "x", "target": 1}, {}, r"f\.jsonl:9: the row has no field 'answer'; got fields question, target"),
        (row(answer=None), {}, "not text or a number"),
        (row(answer=True), {}, "not text or a number"),
        (row(answer=float("nan")), {}, "not text or a number"),
        (row(answer=float("inf")), {}, "not text or a number"),  # as JSON's 1e400 reads
        (row(answer=["1"]), {}, "not text or a number"),
        (row(""), {}, "the question is empty"),
        (row([]), {}, "the question is empty"),
        (row([{"role": "assistant", "content": "x"}]), {}, "the question is empty"),
        (row(5), {}, "neither text nor chat messages"),
        (row([{"role": "user"}]), {}, "neither text nor chat messages"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_by_its_place(fields, settings, message):
    with pytest.raises(DataError, match=message) as caught:
        build_prompts([Row(fields, "f.jsonl:9")], WordTokenizer(), DataConfig(**settings), 100)
    assert "f.jsonl:9" in str(caught.value)


def test_a_template_without_a_place_for_the_question_is_refused():
    with pytest.raises(ConfigError, match="no place for the question"):
        build(row(), prompt_template="Solve this.")


def prompts(count):
    return [Prompt(id=str(i), question="q", answer="a", text="t", token_ids=(1,)) for i in range(count)]


def ids(drawn):
    return [int(prompt.id) for prompt in drawn]


@given(st.integers(1, 12), st.integers(0, 2**40), st.lists(st.integers(1, 9), max_size=12))
def test_every_epoch_holds_every_prompt_once_however_it_is_drawn(count, seed, sizes):
    sampler, whole = PromptSampler(prompts(count), seed), PromptSampler(prompts(count), seed)
    drawn = [i for size in sizes for i in ids(sampler.next(size))]
    assert drawn == ids(whole.next(sum(sizes)))
    for start in range(0, len(drawn) - count + 1, count):
        assert sorted(drawn[start : start + count]) == list(range(count))
    assert sampler.epochs == pytest.approx(sum(sizes) / count)


def test_order_depends_on_seed_and_epoch():
    first = ids(PromptSampler(prompts(50), 1).next(100))
    assert first == ids(PromptSampler(prompts(50), 1).next(100))
    assert first != ids(PromptSampler(prompts(50), 2).next(100))
    assert first[:50] != first[50:]
    assert first[:50] != list(range(50))


@given(st.integers(1, 10), st.integers(0, 35), st.integers(1, 25))
def test_a_restored_cursor_continues_exactly(count, drawn, more):
    sampler = PromptSampler(prompts(count), 3)
    sampler.next(drawn)
    state = json.loads(json.dumps(sampler.state_dict()))
    restored = PromptSampler(prompts(count), 3)
    restored.load_state_dict(state)
    assert ids(restored.next(more)) == ids(sampler.next(more))
    assert restored.state_dict() == sampler.state_dict()


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (PromptSampler(prompts(5), 4), "train.seed"),
        (PromptSampler(prompts(6), 3), "the number of prompts"),
        (PromptSampler([*prompts(4), prompts(6)[5]], 3), r"the prompts \(ids, tokens or answers\)"),
    ],
)
def test_a_cursor_of_other_data_or_seed_is_refused(other, what):
    with pytest.raises(DataError, match=f"cannot be resumed: {what} changed"):
        other.load_state_dict(PromptSampler(prompts(5), 3).state_dict())

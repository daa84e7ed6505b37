"""Text becomes token sequences in a way that is described, and that is refused where it cannot be."""

import json

import pytest

from qerl.errors import ConfigError, DataError
from qerl.model.checkpoint import resolve_model_path
from qerl.model.tokenizer import load_tokenizer
from qerl.quantize.texts import calibration_text, report_text, split_fields


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(resolve_model_path("demo"))


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_rows_are_packed_end_to_end_and_cut(tokenizer, tmp_path):
    rows = [{"question": "What is 1 + 2?", "solution": "1 + 2 = 3"}, {"question": "3 + 4", "solution": None}] * 9
    text = calibration_text(write(tmp_path / "a.jsonl", rows), tokenizer, count=3, length=20)
    eos = tokenizer.eos_ids[0]
    expected = []
    for row in rows:
        expected += [*tokenizer.encode("\n".join(part for part in row.values() if part)), eos]
    assert [token for sequence in text.sequences for token in sequence.ids] == expected[:60]
    assert [len(sequence.ids) for sequence in text.sequences] == [20, 20, 20]
    assert text.record["count"] == 3 and text.record["length"] == 20
    lengths = [len(tokenizer.encode("\n".join(part for part in row.values() if part))) + 1 for row in rows]
    assert sum(lengths[: text.record["rows"] - 1]) < 60 <= sum(lengths[: text.record["rows"]])


def test_fields_are_chosen(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", [{"text": "7 + 8 = 15", "question": "no"}])
    text = report_text(path, tokenizer, count=5, length=99, fields=split_fields("text"))
    assert list(text.sequences[0].ids) == tokenizer.encode("7 + 8 = 15")
    assert text.sequences[0].first == 1
    with pytest.raises(DataError, match=r"a\.jsonl:1 has no text.*solution.*--text-fields"):
        report_text(path, tokenizer, count=5, length=99, fields=("solution",))
    with pytest.raises(ConfigError, match="no text field"):
        split_fields(" , ")


def test_of_a_rollout_only_answers_are_scored(tokenizer, tmp_path):
    rows = [
        {"prompt_token_ids": [5, 6, 7], "token_ids": [8, 9, 2]},
        {"prompt_token_ids": [5, 6, 7, 8], "token_ids": [9]},
        {"prompt_token_ids": [5] * 30, "token_ids": [9]},
    ]
    text = report_text(write(tmp_path / "a.jsonl", rows), tokenizer, count=3, length=5)
    assert [(sequence.ids, sequence.first) for sequence in text.sequences] == [
        ((5, 6, 7, 8, 9), 3),
        ((5, 6, 7, 8, 9), 4),
    ]
    assert text.record["scored"] == "answers of a rollout"
    assert text.record["count"] == 2, "the third is cut before its answer"


def test_the_record_tells_texts_apart(tokenizer, tmp_path):
    hashes = set()
    for name, question in (("a", "1 + 1"), ("b", "1 + 2")):
        path = write(tmp_path / f"{name}.jsonl", [{"question": question}] * 20)
        hashes.add(calibration_text(path, tokenizer, count=1, length=20).record["sha256"])
        hashes.add(calibration_text(path, tokenizer, count=2, length=10).record["sha256"])
    assert len(hashes) == 4


def test_too_little_text_is_refused_with_what_there_is(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", [{"question": "1 + 1 = 2"}] * 10)
    tokens = 10 * (len(tokenizer.encode("1 + 1 = 2")) + 1)
    with pytest.raises(
        DataError, match=rf"{tokens} tokens = {tokens // 8} sequences of 8.*--calibration-count {tokens // 8}"
    ):
        calibration_text(path, tokenizer, count=1000, length=8)
    with pytest.raises(DataError, match="smaller --calibration-length"):
        calibration_text(path, tokenizer, count=1, length=4000)
    with pytest.raises(DataError, match=r"nothing in .* can be scored"):
        report_text(path, tokenizer, count=3, length=1)

import json
import sys
import types

import pytest

from qerl.data.suites import SUITES, split_list
from qerl.data.tasks import load_rows, read_file
from qerl.errors import DataError, MissingDependencyError

ROWS = [{"id": "a", "question": "1 + 1?", "answer": "2"}, {"id": "b", "question": "2 + 2?", "answer": "4"}]


@pytest.fixture(autouse=True)
def data_root(tmp_path, monkeypatch):
    root = tmp_path / "data"
    for name, splits in {"sums": ("train", "test"), "exam": ("test",)}.items():
        for split in splits:
            write(root / name / f"{split}.jsonl", [{**row, "id": f"{name}-{split}-{row['id']}"} for row in ROWS])
    monkeypatch.setenv("QERL_DATA", str(root))
    monkeypatch.chdir(tmp_path)
    return root


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_a_file_gives_its_rows_in_order(tmp_path, suffix):
    path = tmp_path / f"mine{suffix}"
    if suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    else:
        write(path, ROWS)
    loaded = load_rows(str(path), default_split="train")
    assert loaded.rows == ROWS
    assert loaded.location == str(path)
    assert loaded.warnings == ()


def test_blank_lines_are_skipped_and_places_keep_the_line_number(tmp_path):
    path = tmp_path / "gaps.jsonl"
    path.write_text("\ufeff" + json.dumps(ROWS[0]) + "\n\n  \r\n" + json.dumps(ROWS[1]), encoding="utf-8")
    rows = read_file(path)
    assert rows == ROWS
    assert [row.place for row in rows] == [f"{path}:1", f"{path}:4"]


def test_names_resolve_as_path_then_built_in_then_data_folder(tmp_path):
    assert load_rows("sums", default_split="train").rows[0]["id"] == "sums-train-a"
    assert load_rows("sums:test", default_split="train").rows[0]["id"] == "sums-test-a"
    assert load_rows("sums", default_split="test").split == "test"
    assert load_rows("data/sums", default_split="test").rows[0]["id"] == "sums-test-a"
    assert load_rows("arithmetic", default_split="test").location == "built-in arithmetic"
    write(tmp_path / "sums" / "train.jsonl", [{**ROWS[0], "id": "nearer"}])
    assert load_rows("sums", default_split="train").rows[0]["id"] == "nearer"
    write(tmp_path / "odd:name.jsonl", [{**ROWS[0], "id": "colon"}])
    assert load_rows("odd:name.jsonl", default_split="train").rows[0]["id"] == "colon"


def test_the_built_in_splits_have_the_documented_sizes_and_share_no_question():
    train = load_rows("arithmetic", default_split="train").rows
    test = load_rows("arithmetic", default_split="test").rows
    assert (len(train), len(test)) == (20_000, 1_000)
    assert set(train[0]) == {"id", "question", "answer", "solution"}
    assert not {row["question"] for row in train} & {row["question"] for row in test}


@pytest.mark.parametrize("name", ["exam:test", "data/exam/test.jsonl", "arithmetic:test"])
def test_training_on_held_out_data_warns(name):
    (warning,) = load_rows(name, default_split="train").warnings
    assert "test split" in warning
    assert load_rows(name, default_split="test").warnings == ()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "x"', r"bad\.jsonl:3: the line is not JSON \(Expecting ',' delimiter at column 17\)"),
        ('{"question": "x"\n', r"bad\.jsonl:3: the line is not JSON \(Expecting ',' delimiter at column 17\)"),
        ('{"question" "x"}', r"bad\.jsonl:3: the line is not JSON \(Expecting ':' delimiter at column 13\)"),
        ("[1, 2]", r"bad\.jsonl:3: the line is not a JSON object"),
        (5000 * "[", r"bad\.jsonl:3: the line cannot be read"),
        ('{"answer": ' + 5000 * "9" + "}", r"bad\.jsonl:3: the line cannot be read"),
        ('"text"', r"bad\.jsonl:3: the line is not a JSON object"),
        (b'{"question": "\xff"}', r"bad\.jsonl:3: the line is not UTF-8"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    good = json.dumps(ROWS[0]).encode()
    path.write_bytes(b"\n".join([good, b"", line if isinstance(line, bytes) else line.encode()]))
    with pytest.raises(DataError, match=message):
        load_rows(str(path), default_split="train")


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_file_is_an_empty_data_set(tmp_path, content):
    path = tmp_path / "none.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match="empty data set"):
        load_rows(str(path), default_split="train")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("data/sums/tran.jsonl", "Did you mean 'data/sums/train.jsonl'"),
        ("./nothing", "no such file, no built-in and no folder under"),
        ("exam", "has no split 'train'.*Name a split that exists: exam:test"),
        ("arithmetic:dev", "has no split 'dev'.*one of test, train"),
        ("data/notes.txt", "unknown kind of data file"),
        ("data/torn.parquet", "cannot be read as parquet"),
    ],
)
def test_what_does_not_exist_is_named_with_the_nearest_match(data_root, name, message):
    (data_root / "notes.txt").write_text("x")
    (data_root / "torn.parquet").write_text("x")
    with pytest.raises(DataError, match=message):
        load_rows(name, default_split="train")


def test_what_is_no_file_is_not_given_as_its_own_nearest_match(data_root):
    (data_root / "gone.jsonl").symlink_to("nowhere")
    with pytest.raises(DataError) as caught:
        load_rows("data/gone.jsonl", default_split="train")
    assert "there is no data set" in str(caught.value) and "Did you mean 'data/gone.jsonl'" not in str(caught.value)


def test_a_hub_name_without_the_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependencyError, match="pip install datasets"):
        load_rows("owner/set", default_split="train")


def test_a_name_without_an_owner_is_not_looked_for_on_the_hub(monkeypatch):
    """A mistyped name of a local data set gets its answer at once, not after the hub's retries."""

    def load(*_, **__):
        raise AssertionError("the hub was asked")

    fake_hub(monkeypatch, load)
    with pytest.raises(DataError, match="Did you mean 'sums'"):
        load_rows("sumz", default_split="train")


def fake_hub(monkeypatch, load):
    module = types.ModuleType("datasets")
    module.load_dataset = load
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_a_hub_data_set_is_read_by_owner_name_config_and_split(monkeypatch):
    calls = []

    def load(*arguments, **keywords):
        calls.append((arguments, keywords))
        return iter(ROWS)

    fake_hub(monkeypatch, load)
    loaded = load_rows("owner/sums/main:validation", default_split="test")
    assert calls == [(("owner/sums", "main"), {"split": "validation"})]
    assert loaded.rows == ROWS
    assert loaded.rows[1].place == "owner/sums/main:validation:2"


@pytest.mark.parametrize(
    "error", [ConnectionError("offline"), ValueError("Unknown split"), FileNotFoundError("absent")]
)
def test_a_hub_failure_is_a_data_error(monkeypatch, error):
    def load(*_, **__):
        raise error

    fake_hub(monkeypatch, load)
    with pytest.raises(DataError, match=str(error)) as caught:
        load_rows("owner/sums", default_split="train")
    assert "QERL_DATA" in caught.value.remedy


def test_a_benchmark_is_read_from_its_folder_first_and_else_from_the_hub_under_our_fields(monkeypatch, data_root):
    calls = []

    def load(*arguments, **keywords):
        calls.append((arguments, keywords))
        return iter([{"problem": "1+1?", "answer": 2, "unique_id": "a"}])

    fake_hub(monkeypatch, load)
    (data_root / "gsm8k").mkdir()
    (data_root / "gsm8k" / "test.jsonl").write_text('{"question": "q", "answer": "1"}\n')
    assert load_rows("gsm8k", default_split="test").rows == [{"question": "q", "answer": "1"}]
    assert calls == []
    loaded = load_rows("math500", default_split="test")
    assert loaded.rows == [{"problem": "1+1?", "question": "1+1?", "answer": "2", "unique_id": "a"}]
    assert loaded.location == "hub HuggingFaceH4/MATH-500"
    load_rows("aime24", default_split="test")
    load_rows("aime24:extra", default_split="test")
    assert [keywords["split"] for _, keywords in calls] == ["test", "train", "extra"]
    with pytest.raises(DataError, match="has no field 'question'"):
        load_rows("multiarith", default_split="test")


def test_a_benchmark_that_is_nowhere_says_where_to_put_it(monkeypatch, data_root):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"\$QERL_DATA/asdiv/test.jsonl"):
        load_rows("asdiv", default_split="test")
    with pytest.raises(MissingDependencyError, match=r"'gsm8k'.*pip install datasets"):
        load_rows("gsm8k", default_split="test")


@pytest.mark.parametrize("name", sorted(SUITES))
def test_suites_are_told_apart_and_described(name):
    suite = SUITES[name]
    assert suite.about
    assert suite.hub is None or suite.hub.count("/") in (1, 2)
    assert split_list(f" {name}, gsm8k:train ,{name}") == tuple(dict.fromkeys((name, "gsm8k:train")))


def test_a_path_with_a_comma_is_one_suite(tmp_path):
    path = tmp_path / "a,b.jsonl"
    path.write_text("{}")
    assert split_list(str(path)) == (str(path),)

"""The tokenizer wrapper: the folder's own template, every EOS id, and hashes that notice changes."""

import json

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qerl.errors import CheckpointError
from qerl.model.tokenizer import load_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    "<s>{{ m['role'] }} {{ m['content'] }}<e>{% endfor %}{% if add_generation_prompt %}<s>assistant {% endif %}"
)
WORDS = ["<pad>", "<s>", "<e>", "<end>", "<unk>", "user", "assistant", "two", "and", "three"]


def write_tokenizer(folder, *, template=TEMPLATE, config=None, generation=None, words=tuple(WORDS), eos="<e>"):
    folder.mkdir(exist_ok=True)
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=eos,
        unk_token="<unk>",
        pad_token="<pad>",
        extra_special_tokens=["<s>", "<end>"],
        chat_template=template,
    ).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", **(config or {})}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_chat_is_rendered_by_the_folders_template(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    messages = [{"role": "user", "content": "two and three"}]
    assert tokenizer.render(messages) == "<s>user two and three<e><s>assistant "
    assert tokenizer.render(messages, add_generation_prompt=False) == "<s>user two and three<e>"


def test_splitting_rules_are_those_of_the_file_and_not_of_the_architecture(tmp_path):
    """A qwen2 folder with a word tokenizer of its own: byte-level rules would find no word of it."""
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    assert tokenizer.encode("two and three") == [7, 8, 9]


def test_encoding_adds_nothing_and_decoding_drops_special_tokens(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    ids = tokenizer.encode("<s>user two<e>")
    assert ids == [1, 5, 7, 2]
    assert tokenizer.decode(ids) == "usertwo"
    assert len(tokenizer) == len(WORDS)


def test_eos_ids_are_the_union_of_all_places(tmp_path):
    folder = write_tokenizer(tmp_path, config={"eos_token_id": 9}, generation={"eos_token_id": [3, 2]})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_ids == (3, 2, 9)
    assert tokenizer.pad_id == 0
    assert load_tokenizer(write_tokenizer(tmp_path / "b", config={"eos_token_id": 3})).eos_ids == (3, 2)


def test_hashes_notice_a_changed_word_or_template(tmp_path):
    base = load_tokenizer(write_tokenizer(tmp_path / "a"))
    same = load_tokenizer(write_tokenizer(tmp_path / "b"))
    assert (base.tokenizer_hash, base.template_hash) == (same.tokenizer_hash, same.template_hash)
    word = load_tokenizer(write_tokenizer(tmp_path / "c", words=[*WORDS[:-1], "four"]))
    assert word.tokenizer_hash != base.tokenizer_hash
    assert word.template_hash == base.template_hash
    template = load_tokenizer(write_tokenizer(tmp_path / "d", template=TEMPLATE + " "))
    assert template.template_hash != base.template_hash


def test_a_missing_template_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"no chat template.*instruct checkpoint"):
        load_tokenizer(write_tokenizer(tmp_path, template=None))


def test_messages_that_the_template_refuses(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    with pytest.raises(CheckpointError, match=r"no system message.*data\.system_prompt"):
        tokenizer.render([{"role": "system", "content": "x"}, {"role": "user", "content": "two"}])


def test_a_model_without_any_eos_id_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no end-of-sequence token"):
        load_tokenizer(write_tokenizer(tmp_path, eos=None))


def test_missing_or_broken_tokenizer_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    with pytest.raises(CheckpointError, match=r"holds no tokenizer; expected one of tokenizer\.json"):
        load_tokenizer(tmp_path)
    folder = write_tokenizer(tmp_path / "broken")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_tokenizer(folder)

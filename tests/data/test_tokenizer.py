"""One test class for every tokenizer, then what is special to each."""

import json

import numpy as np
import pytest

from moe_jax.data import ByteTokenizer, DataConfig, build_tokenizer
from moe_jax.data.train_tokenizer import train_tokenizer
from moe_jax.errors import UserError

TEXT = "def f(x):\n    return 'né' * x  # \U0001f600\n" * 3


@pytest.fixture(params=["byte", "trained"])
def tokenizer(request, tmp_path):
    if request.param == "byte":
        return build_tokenizer(DataConfig())
    (tmp_path / "t.txt").write_text(TEXT)
    out = str(tmp_path / "tokenizer.json")
    train_tokenizer(DataConfig(path=str(tmp_path / "t.txt")), out, 300)
    return build_tokenizer(DataConfig(tokenizer=out))


def encode(tokenizer, text):
    return tokenizer.encode_batch([text])[0]


def test_every_tokenizer(tokenizer):
    texts = (TEXT, "", "\x00\x7f \t\n", "never seen: жß")
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert tokenizer.decode(ids) == text
        assert ids.dtype == np.int32 and ids.ndim == 1
        assert not ids.size or (0 <= ids.min() and ids.max() < tokenizer.vocab_size)
        assert not np.isin(ids, [tokenizer.end_id, tokenizer.mask_id]).any()
    assert len({tokenizer.end_id, tokenizer.mask_id}) == 2
    assert max(tokenizer.end_id, tokenizer.mask_id) < tokenizer.vocab_size
    ids = [*encode(tokenizer, "a"), tokenizer.end_id, *encode(tokenizer, "b"), tokenizer.mask_id]
    shown = tokenizer.decode(np.array(ids))
    assert shown.startswith("a<|end") and "b<|mask|>" in shown


def test_byte_tokenizer_is_utf8_and_shows_what_is_no_text():
    # é is C3 A9 in UTF-8.
    assert encode(ByteTokenizer(), "aé").tolist() == [0x61, 0xC3, 0xA9]
    # Half a character, and an id that only a model with a padded vocabulary can produce.
    assert ByteTokenizer().decode(np.array([0x61, 0xC3, 0x62, 300])) == "a\ufffdb\ufffd"


@pytest.fixture
def word_file(tmp_path):
    """Write a tokenizer.json of whole words with a hole in the ids, truncation at 2 and no end or mask."""
    pytest.importorskip("tokenizers")
    path = tmp_path / "words.json"
    path.write_text(
        json.dumps(
            {
                "version": "1.0",
                "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
                "padding": None,
                "added_tokens": [],
                "normalizer": None,
                "pre_tokenizer": {"type": "WhitespaceSplit"},
                "post_processor": None,
                "decoder": None,
                "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 7}, "unk_token": "a"},
            }
        )
    )
    return str(path)


def test_hugging_face_tokenizer_appends_missing_marks_after_the_largest_id_and_never_truncates(word_file):
    tokenizer = build_tokenizer(DataConfig(tokenizer=word_file))
    assert encode(tokenizer, "c b a c").tolist() == [7, 1, 0, 7]
    # Ids 0, 1, 7: three words, but the next free id is 8.
    assert (tokenizer.end_id, tokenizer.mask_id, tokenizer.vocab_size) == (8, 9, 10)


def test_the_end_is_that_of_the_files_beside_the_tokenizer(word_file, tmp_path):
    """generation_config.json before config.json, an id or a list of them, and ids that the tokenizer does not have."""
    built = lambda: build_tokenizer(DataConfig(tokenizer=word_file))  # noqa: E731
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    assert (built().end_id, built().end_ids, built().mask_id, built().vocab_size) == (1, (1,), 8, 9)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert built().end_id == 1
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 11, 1]}')
    found = built()
    assert (found.end_id, found.end_ids, found.mask_id, found.vocab_size) == (7, (7, 11, 1), 12, 13)
    assert found.decode(np.array([1, 11])) == "b<|end|>"
    for text, words in (("[]", "cannot read"), ('{"eos_token_id": [-1]}', r"eos_token_id \(\[-1\]\) must be an id")):
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(UserError, match=words):
            built()


def test_build_tokenizer_refuses(tmp_path):
    with pytest.raises(UserError, match=r"\('bytes'\) must be 'byte' or the path of a tokenizer.json \(No such file"):
        build_tokenizer(DataConfig(tokenizer="bytes"))
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(UserError, match=r"x.json'\) is not a tokenizer.json \(.*\); name one"):
        build_tokenizer(DataConfig(tokenizer=str(tmp_path / "x.json")))


def test_build_tokenizer_says_which_package_is_missing(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(UserError, match="needs the package 'tokenizers', which is not installed; pip install"):
        build_tokenizer(DataConfig(tokenizer="t.json"))

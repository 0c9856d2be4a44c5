"""What every tokenizer does, what is special to each, and the command that makes one."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import chat_cases
from train_tokenizer import train_tokenizer

from moe_jax.data.cache import build_cache
from moe_jax.data.corpus import DataConfig
from moe_jax.data.tokenizer import ByteTokenizer, build_tokenizer, carry_files, find_tokenizer, with_kept_file
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
        assert tokenizer.byte_counts()[ids].sum() == len(text.encode())
    assert len({tokenizer.end_id, tokenizer.mask_id}) == 2
    assert not tokenizer.byte_counts()[[tokenizer.end_id, tokenizer.mask_id]].any()
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
    absent = ("padding", "normalizer", "post_processor", "decoder")
    content = {
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 7}, "unk_token": "a"},
    }
    (tmp_path / "words.json").write_text(json.dumps({**content, **dict.fromkeys(absent)}))
    return str(tmp_path / "words.json")


def test_a_run_takes_the_tokenizer_of_its_folder_and_no_other(word_file, tmp_path):
    """The named file may change or go; what the run trained with is the copy, and a changed copy is refused."""
    config, folder = DataConfig(tokenizer=word_file), tmp_path / "run"
    folder.mkdir()
    name = build_tokenizer(config).name
    assert find_tokenizer(config, folder, name).name == name == find_tokenizer(config, folder, None).name
    carry_files(tmp_path, folder)
    assert not list(folder.iterdir()) and with_kept_file(config, folder) is config  # of the usual names none
    shutil.move(word_file, folder / "tokenizer.json")
    assert find_tokenizer(config, folder, name).name == name == build_tokenizer(with_kept_file(config, folder)).name
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + " ")
    with pytest.raises(UserError, match=f"is not the tokenizer that {folder} was trained with .*; put that one back"):
        find_tokenizer(config, folder, name)
    (folder / "tokenizer.json").unlink()
    assert find_tokenizer(config, folder, name) is None


def test_hugging_face_tokenizer_appends_missing_marks_after_the_largest_id_and_never_truncates(word_file):
    tokenizer = build_tokenizer(DataConfig(tokenizer=word_file))
    assert encode(tokenizer, "c b a c").tolist() == [7, 1, 0, 7]
    # Ids 0, 1, 7: three words, but the next free id is 8.
    assert (tokenizer.end_id, tokenizer.mask_id, tokenizer.vocab_size) == (8, 9, 10)
    assert tokenizer.byte_counts() is None


def test_the_end_is_that_of_the_files_next_to_the_tokenizer(word_file, tmp_path):
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
    for text, words in (
        ("[]", "cannot read"),
        ("[" * 100_000, r"cannot read .*generation_config.json \(maximum recursion"),
        ('{"eos_token_id": [-1]}', r"eos_token_id \(\[-1\]\) must be an id"),
        ('{"eos_token_id": 1000000000000}', r"eos_token_id \(1000000000000\) must be an id below 16777216"),
        ('{"eos_token_id": 1' + "0" * 400 + "}", r"eos_token_id \(10{79}\) must be an id below 16777216"),
    ):
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(UserError, match=words):
            built()


# what a post-processor makes of a text -> front, back; 265 is the end
AROUND = {
    "": ([], []), "[INST] $A": ([268], []), "[INST] $A [/INST]": ([268], [269]), "$A <|end|>": ([], []),
    "[INST] <|im_start|> $A [/INST] <|end|>": ([268, 266], [269]),
}  # fmt: skip


@pytest.mark.parametrize("around", AROUND)
def test_documents_and_prompts_have_what_the_post_processor_puts(tmp_path, monkeypatch, around):
    """Front before both; back behind documents alone, and no end twice; none in a chat, nor where a binding says so."""
    monkeypatch.setattr("moe_jax.data.corpus.BLOCK_BYTES", 4)  # the first document comes in pieces
    for name, text in (("1.txt", "no\nno\n"), ("2.txt", "z")):
        (tmp_path / name).write_text(text)
    paths = {"path": f"{tmp_path}/*.txt", "cache_dir": str(tmp_path / "cache"), "held_out_fraction": 0.4}
    config = DataConfig(tokenizer=str(chat_cases.write_tokenizer(tmp_path / "made", around=around)), **paths)
    put, bare = build_tokenizer(config), build_tokenizer(dataclasses.replace(config, add_special_tokens=False))
    (front, back), long, short = AROUND[around], encode(bare, "no\nno\n").tolist(), encode(bare, "z").tolist()
    assert build_cache(config).tokens.tolist() == [*front, *long, *back, 265, *front, *short, *back, 265]
    assert build_cache(config, bare).tokens.tolist() == [*long, 265, *short, 265]
    assert put.encode_prompt("z").tolist() == [*front, *short] and bare.encode_prompt("z").tolist() == short
    assert put.encode_with_places(["z"])[0][0].tolist() == short and put.name == bare.name
    carry_files(tmp_path / "made", tmp_path, add_special_tokens=False)  # as an export of a run without them does
    exported = build_tokenizer(DataConfig(tokenizer=str(tmp_path / "tokenizer.json")))
    assert exported.encode_prompt("z").tolist() == short
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["add_bos_token"] is False


def test_build_tokenizer_refuses(tmp_path, monkeypatch):
    (tmp_path / "x.json").write_text("{}")
    for path, words in (
        ("bytes", r"\('bytes'\) must be 'byte' or the path of a tokenizer.json \(No such file"),
        (str(tmp_path / "x.json"), r"x.json'\) is not a tokenizer.json \(.*\); name another"),
        (None, "needs the package 'tokenizers', which is not installed; pip install"),
    ):
        if path is None:
            monkeypatch.setitem(sys.modules, "tokenizers", None)
        with pytest.raises(UserError, match=words):
            build_tokenizer(DataConfig(tokenizer=path or "t.json"))


ROOT = Path(__file__).parents[2]
SAME = "the same words again and again, the same words\n" * 20


def run(*arguments):
    command = [sys.executable, "scripts/train_tokenizer.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_command_writes_a_tokenizer_that_a_cache_can_use(tmp_path):
    (tmp_path / "t.txt").write_text(SAME)
    out = tmp_path / "new" / "tokenizer.json"
    done = run(f"--data={tmp_path}/t.txt", f"--out={out}", "--vocab_size=270")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{out}: 270 ids\n"
    config = DataConfig(path=str(tmp_path / "t.txt"), tokenizer=str(out), cache_dir=str(tmp_path / "cache"))
    tokenizer = build_tokenizer(config)
    assert (tokenizer.vocab_size, tokenizer.end_id, tokenizer.mask_id) == (270, 0, 1)
    built = build_cache(config, tokenizer, vocab_size=270)
    assert built.meta.tokens < len(SAME) * 0.7  # pairs were merged
    assert tokenizer.decode(built.tokens[:-1]) == SAME and built.tokens[-1] == tokenizer.end_id


PANICS = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
FAILING = [
    ({"pre_tokenizer": PANICS}, r"fails on a text \(Onig.*\); name another"),
    ({"normalizer": {**PANICS, "type": "Replace", "content": ""}}, "fails on a text"),
    ({"normalizer": "nested"}, "is not a tokenizer.json"),
    ({"vocab": {"a": 2**32 - 1}}, "the id 4294967295 is not below 16777216; name another"),
    ({"vocab": {"a": 2**32}}, r"is not a tokenizer.json \(.*\); name another"),
    ({"unk_token": "none"}, "fails on a text"),
]


@pytest.mark.parametrize(("part", "words"), FAILING)
def test_a_tokenizer_that_fails_is_one_line(word_file, part, words):
    content = json.loads(Path(word_file).read_text())
    (content["model"] if part.keys() < content["model"].keys() else content).update(part)
    Path(word_file).write_text(json.dumps(content).replace('"nested"', "[" * 100_000 + "]" * 100_000))
    with pytest.raises(UserError, match=words) as caught:
        build_tokenizer(DataConfig(tokenizer=word_file)).encode_batch(["a" * 40 + "b"])
    assert "\n" not in str(caught.value)

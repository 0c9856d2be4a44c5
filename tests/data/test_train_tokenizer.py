"""The command: a file that the rest of the package can use, and one line for each mistake."""

import subprocess
import sys
from pathlib import Path

import pytest

from moe_jax.data import DataConfig, build_cache, build_tokenizer
from moe_jax.data.train_tokenizer import train_tokenizer
from moe_jax.errors import UserError

ROOT = Path(__file__).parents[2]
TEXT = "the same words again and again, the same words\n" * 20


def run(*arguments):
    command = [sys.executable, "-m", "moe_jax.data.train_tokenizer", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_command_writes_a_tokenizer_that_a_cache_can_use(tmp_path):
    (tmp_path / "t.txt").write_text(TEXT)
    out = tmp_path / "new" / "tokenizer.json"
    done = run(f"--data={tmp_path}/t.txt", f"--out={out}", "--vocab_size=270")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{out}: 270 ids from {len(TEXT)} bytes of text\n"
    config = DataConfig(path=str(tmp_path / "t.txt"), tokenizer=str(out), cache_dir=str(tmp_path / "cache"))
    tokenizer = build_tokenizer(config)
    assert (tokenizer.vocab_size, tokenizer.end_id, tokenizer.mask_id) == (270, 0, 1)
    built = build_cache(config, tokenizer, vocab_size=270)
    assert built.meta.tokens < len(TEXT) * 0.7  # pairs were merged
    assert tokenizer.decode(built.tokens[:-1]) == TEXT and built.tokens[-1] == tokenizer.end_id


def test_command_ends_a_mistake_with_one_line_and_two():
    done = run("--data=/no/such/file", "--out=x.json")
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("DataConfig.path ('/no/such/file'): '/no/such/file' is no file")


def test_train_tokenizer_is_repeatable_and_says_when_the_text_gives_fewer_ids(tmp_path):
    config = DataConfig(path=str(tmp_path / "t.txt"))
    (tmp_path / "t.txt").write_text("ab ab")
    for name in ("a.json", "b.json"):
        line = train_tokenizer(config, str(tmp_path / name), 1000)
        # 258 to begin with; "ab" and " ab" are all the pairs that there are.
        assert "260 ids (1000 asked, the text has no more pairs) from 5 bytes" in line
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_train_tokenizer_refuses(tmp_path):
    (tmp_path / "t.txt").write_text("")
    config = DataConfig(path=str(tmp_path / "t.txt"))
    with pytest.raises(UserError, match=r"--vocab_size \(257\) must be at least 258"):
        train_tokenizer(config, str(tmp_path / "o.json"), 257)
    with pytest.raises(UserError, match=r"is a folder; name a file, for example .*tokenizer.json"):
        train_tokenizer(config, str(tmp_path), 300)
    with pytest.raises(UserError, match="--data names files without any text"):
        train_tokenizer(config, str(tmp_path / "o.json"), 300)
    (tmp_path / "t.txt").write_text("text")
    with pytest.raises(UserError, match=r"--out \(.*\) cannot be written \(File exists\); name another file"):
        train_tokenizer(config, str(tmp_path / "t.txt" / "o.json"), 300)

"""A cache is whole or absent: kills, races, damage, full disks; what is in it, what is held out."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from moe_jax.data import cache
from moe_jax.data.cache import TokenSpan, build_cache, split_documents, uniform
from moe_jax.data.corpus import DataConfig
from moe_jax.data.tokenizer import ByteTokenizer
from moe_jax.errors import UserError

ROOT = Path(__file__).parents[2]
END = ByteTokenizer.end_id


@pytest.fixture
def config(tmp_path):
    """Name three documents, ab, c and déf, and a folder for the cache."""
    (tmp_path / "text").mkdir()
    for name, text in (("1.txt", "ab"), ("2.txt", "c"), ("3.txt", "déf")):
        (tmp_path / "text" / name).write_text(text)
    return DataConfig(path=str(tmp_path / "text"), cache_dir=str(tmp_path / "cache"), held_out_fraction=0.2)


def caches(config):
    return [path for path in Path(config.cache_dir).glob("tokens-*") if path.is_dir()]


def left_over(config):
    return list(Path(config.cache_dir).glob(".building-*"))


def start(code, *arguments):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=ROOT, **pipes)


class Untouched(ByteTokenizer):
    """Fail when asked to encode: for caches that must be found, not built."""

    def encode_batch(self, texts):
        raise AssertionError("the cache was built again")


def test_build_cache_holds_each_document_and_its_end(config):
    built = build_cache(config)
    # é is two bytes: ab$ c$ d??f$ are 3 + 2 + 5 tokens.
    expected = [*b"ab", END, *b"c", END, *"déf".encode(), END]
    assert built.tokens.tolist() == expected and built.tokens.dtype == np.uint16
    assert built.ends.tolist() == [3, 5, 10]
    assert (built.meta.tokens, built.meta.documents, built.meta.max_id) == (10, 3, END)
    # 0.2 of 10 tokens: the last two, because one document of three can be no fifth of the text.
    assert built.train.read(0, 99).tolist() == expected[:8] and built.held_out.read(0, 99).tolist() == expected[8:]


def test_build_cache_is_found_again_until_the_text_changes(config):
    first = build_cache(config)
    assert build_cache(config, Untouched()).meta == first.meta
    Path(config.path, "2.txt").write_text("cc")
    changed = build_cache(config)
    assert changed.meta.tokens == 11 and changed.meta.content != first.meta.content
    Path(config.path, "2.txt").write_text("dd")  # as long as before, but changed a second later
    os.utime(Path(config.path, "2.txt"), (time.time() + 1,) * 2)
    assert build_cache(config).tokens.tolist()[3:5] == [*b"dd"]
    assert len(caches(config)) == 3

    class Wide(ByteTokenizer):
        name, vocab_size, end_id = "wide", 70_001, 70_000

    assert build_cache(config, Wide()).tokens.tolist()[2] == 70_000  # in four bytes


def test_build_cache_refuses_a_token_outside_the_vocabulary_and_files_without_text(config, tmp_path):
    build_cache(config, vocab_size=257)
    words = r"can hold token 256 \(DataConfig.tokenizer 'byte', 258 ids\).*ModelConfig.vocab_size \(256\) must be at l"
    with pytest.raises(UserError, match=words):
        build_cache(config, vocab_size=256)
    (tmp_path / "e.txt").write_text("")
    config = DataConfig(path=str(tmp_path / "e.txt"), cache_dir=str(tmp_path / "other"))
    with pytest.raises(UserError, match="names no text: .* holds none; name one that does"):
        build_cache(config)
    assert not caches(config) and not left_over(config)


KILLED = """
import os, signal, sys
from moe_jax.data import cache
from moe_jax.data.cache import build_cache
from moe_jax.data.corpus import DataConfig
from moe_jax.data.tokenizer import ByteTokenizer
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
cache.BATCH_CHARACTERS = 1  # one document at a time
class Dying(ByteTokenizer):
    def encode_batch(self, texts):
        if sys.argv[3] == "writing" and texts == ["c"]:
            die()
        return super().encode_batch(texts)
if sys.argv[3] == "renaming":
    os.replace = die
build_cache(DataConfig(path=sys.argv[1], cache_dir=sys.argv[2], held_out_fraction=0.2), Dying())
"""


@pytest.mark.parametrize("moment", ["writing", "renaming"])
def test_build_cache_killed_leaves_nothing_taken_for_a_cache(config, tmp_path, moment):
    process = start(KILLED, config.path, config.cache_dir, moment)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not caches(config) and len(left_over(config)) == 1  # it was at work, and nothing looks finished
    undisturbed = build_cache(DataConfig(path=config.path, cache_dir=str(tmp_path / "other"), held_out_fraction=0.2))
    (left,) = left_over(config)
    assert build_cache(config).meta == undisturbed.meta  # the dead builder's lock is gone with it
    assert left_over(config) == [left]  # in which somebody may still write
    for path in (*left.iterdir(), left):
        os.utime(path, (time.time() - 2 * cache.ABANDONED_SECONDS,) * 2)
    Path(config.path, "4.txt").write_text("new")
    build_cache(config)
    assert not left_over(config)


RACING = """
import fcntl, sys, time
from moe_jax.data import cache
from moe_jax.data.cache import build_cache
from moe_jax.data.corpus import DataConfig
if sys.argv[3] == "no locks":
    def flock(*_): raise OSError("no locks here")
    fcntl.flock = flock
write = cache._write
def slowly(*arguments):
    print("built")
    meta = write(*arguments)
    time.sleep(0.3)
    return meta
cache._write = slowly
time.sleep(max(0.0, float(sys.argv[4]) - time.time()))
built = build_cache(DataConfig(path=sys.argv[1], cache_dir=sys.argv[2], held_out_fraction=0.2))
print(built.meta.content, built.tokens.sum(), "jax" in sys.modules)
"""


@pytest.mark.parametrize("locks", ["locks", "no locks"])
def test_build_cache_by_three_processes_at_once(config, tmp_path, locks):
    begin = str(time.time() + 1.0)
    processes = [start(RACING, config.path, config.cache_dir, locks, begin) for _ in range(3)]
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    one = build_cache(config, Untouched())
    # Nobody imported jax, and all read the same tokens.
    assert {out.splitlines()[-1] for out, _ in outputs} == {f"{one.meta.content} {one.tokens.sum()} False"}
    assert len(caches(config)) == 1 and not left_over(config)
    if locks == "locks":
        assert sum("built" in out for out, _ in outputs) == 1  # the others waited


def test_build_cache_builds_a_damaged_cache_again(config):
    whole = build_cache(config)
    (folder,) = caches(config)
    for damage in (
        lambda: (folder / "tokens.bin").write_bytes(b"abc"),
        lambda: (folder / "meta.json").unlink(),
        lambda: (folder / "meta.json").write_text('{"format": 1}'),
    ):
        damage()
        again = build_cache(config)
        assert again.meta == whole.meta and again.tokens.tolist()[:3] == [*b"ab", END]
        assert len(caches(config)) == 1 and not left_over(config)


def test_build_cache_on_a_full_disk_says_so_and_cleans_up(config, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache.os, "fsync", full)
    with pytest.raises(UserError, match=r"cannot be written or read \(No space left on device\); make room there or s"):
        build_cache(config)
    assert not caches(config) and not left_over(config)


def spread(runs):
    return [i for start, stop in runs.tolist() for i in range(start, stop)]


def test_split_documents_follows_the_hash_of_the_index():
    # 200 documents of 10 tokens: document i is tokens 10 i to 10 i + 9.
    train, held_out = split_documents(np.arange(1, 201) * 10, 0.1)
    chosen = [i for i in range(200) if float(uniform(3, i)[0]) < 0.1]
    assert 10 <= len(chosen) <= 40
    assert spread(held_out) == [10 * i + j for i in chosen for j in range(10)]
    assert sorted(spread(train) + spread(held_out)) == list(range(2000))
    # Document `chosen` holds 10,000 tokens instead of 10, or there are two documents, of which one would be half of the
    # text, far from 0.05: the tail is held out.
    sizes = np.full(200, 10)
    sizes[chosen[0]] = 10_000
    assert split_documents(np.cumsum(sizes), 0.1)[1].tolist() == [[11990 - 1199, 11990]]
    assert split_documents(np.array([50, 100]), 0.05)[1].tolist() == [[95, 100]]


def test_token_span_read_equals_joined_runs():
    span = TokenSpan(np.arange(100, 130).astype("<u2"), np.array([[2, 5], [9, 10], [20, 26]]))  # 3 + 1 + 6 tokens
    joined = [102, 103, 104, 109, 120, 121, 122, 123, 124, 125]
    assert len(span) == 10
    for start, stop in np.ndindex(11, 13):
        found = span.read(start, stop)
        assert found.tolist() == joined[start:stop] and found.dtype == np.int32

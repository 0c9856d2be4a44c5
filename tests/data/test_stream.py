"""Windows by hand, in an order that only the seed decides; held-out windows; documents; masks; reading ahead."""

import math
import threading
import time
import types

import numpy as np
import pytest

from moe_jax.data import stream
from moe_jax.data.cache import build_cache, hash64, uniform
from moe_jax.data.corpus import DataConfig
from moe_jax.data.stream import (
    HeldOut,
    TokenStream,
    document_numbers,
    inside_documents,
    mask_tokens,
    prefetch,
    unigram_entropy,
)
from moe_jax.data.tokenizer import ByteTokenizer
from moe_jax.errors import UserError

END = ByteTokenizer.end_id


def corpus(tmp_path, text, fraction):
    (tmp_path / "t.txt").write_text(text)
    paths = {"path": str(tmp_path / "t.txt"), "cache_dir": str(tmp_path / "cache")}
    return build_cache(DataConfig(held_out_fraction=fraction, **paths))


@pytest.fixture
def small(tmp_path):
    """Hold 12 tokens: a to j to train on, k and the end held out (0.2 of 12, rounded, are 2)."""
    return corpus(tmp_path, "abcdefghijk", 0.2)


@pytest.fixture
def long(tmp_path):
    """Hold 500 numbers as text; 2,391 tokens, 2,152 of them to train on."""
    return corpus(tmp_path, " ".join(map(str, range(500, 1000))) + " " + "x" * 390, 0.1)


@pytest.fixture
def eight_held_out(tmp_path):
    """Hold 20 tokens, the last 8 held out: m n o p q r s $."""
    return corpus(tmp_path, "abcdefghijklmnopqrs", 0.4)


def text_rows(batch):
    return [bytes(row.tolist()).decode() for row in batch]


def test_batch_windows_share_one_token_and_cover_an_epoch(small):
    stream = TokenStream(small, sequence_length=3, batch_size=3, seed=0)
    # 10 tokens make (10 - 1) // 3 = 3 windows: abc + d, def + g, ghi + j.
    assert stream.windows == [3]
    for epoch in range(5):
        batch = stream.batch(epoch)
        assert batch.dtype == np.int32 and batch.shape == (3, 4)
        assert sorted(text_rows(batch)) == ["abcd", "defg", "ghij"]  # each token but the first is a target once


def test_batch_order_is_pinned(small):
    # Part of every checkpoint: a change of the shuffle, or of the numbers that it hashes, breaks old runs.
    stream = TokenStream(small, sequence_length=1, batch_size=9, seed=17)
    found = ["".join(row[0] for row in text_rows(stream.batch(step))) for step in range(3)]
    assert found == ["hcbgfaedi", "aihbgcefd", "chiegbdaf"]


def test_position_is_checked_on_resume(small, tmp_path):
    def stream(cache=small, batch_size=2, seed=0):
        return TokenStream(cache, sequence_length=3, batch_size=batch_size, seed=seed)

    saved = stream().position(5)
    assert (saved["step"], saved["epoch"]) == (5, 3)  # 10 rows, 3 windows an epoch
    stream().resume(saved)
    for other, words in (
        (stream(seed=1), r"train.seed was 0 in the checkpoint and is 1 now"),
        (stream(batch_size=4), r"train.batch_size was 2 in the checkpoint and is 4 now"),
        (stream(corpus(tmp_path, "abcdefghijkl", 0.2)), r"DataConfig.path, DataConfig.weights or DataConfig.to"),
    ):
        with pytest.raises(UserError, match=words):
            other.resume(saved)


def test_no_window_is_skipped_or_read_twice_after_a_change_of_the_batch(small, tmp_path):
    """Rows of steps 0 to 2 by twos, 3 and 4 by threes, 5 and on by twos are the endless order; another text begins."""

    def stream(batch_size, cache=small):
        return TokenStream(cache, sequence_length=3, batch_size=batch_size, seed=0)

    want = np.concatenate([stream(1).batch(step) for step in range(18)])
    first, second, third = stream(2), stream(3), stream(2)
    second.resume(first.position(3), ["train.batch_size"])
    third.resume(second.position(5), ["train.batch_size"])
    again = stream(2)
    again.resume(third.position(6))
    steps = [(first, 0), (first, 1), (first, 2), (second, 3), (second, 4), (third, 5), (again, 6), (again, 7)]
    np.testing.assert_array_equal(np.concatenate([part.batch(step) for part, step in steps]), want)
    other = stream(3, corpus(tmp_path, "abcdefghijkl", 0.2))
    fresh = other.batch(0)
    other.resume(again.position(8), ["train.batch_size", "DataConfig.path"])
    np.testing.assert_array_equal(other.batch(8), fresh)


def test_a_mixture_takes_its_share_of_each_entry_and_repeats_none_before_its_epoch_ends(tmp_path):
    """Of 3,000 windows 3 of 4 are of the second entry, in any 1,000 in a row within a block; none of the third."""
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 40_001)
    paths = ", ".join(str(tmp_path / f"{name}.txt") for name in "abc")
    cache = build_cache(DataConfig(path=paths, cache_dir=str(tmp_path / "cache"), held_out_fraction=0.01))
    assert cache.meta.entries == [40_002, 80_004, 120_006]
    weights = (0.5, 1.5, 0.0)

    def stream(batch_size):
        return TokenStream(cache, sequence_length=16, batch_size=batch_size, seed=1, weights=weights)

    counts = [np.count_nonzero(stream(1000).batch(step)[:, 0] == ord("b")) for step in range(3)]
    assert counts == [750, 750, 750] and np.count_nonzero(stream(3000).batch(0) == ord("c")) == 0
    parts = np.concatenate([stream(7).batch(step) for step in range(30)])
    np.testing.assert_array_equal(parts, np.concatenate([stream(30).batch(step) for step in range(7)]))
    parts = stream(10_000)._windows(0, np.arange(10_000))
    for (source, _, windows), share in zip(parts, (2500, 7500), strict=True):  # none once more before each has come
        times = np.bincount(windows, minlength=len(source))
        assert windows.size == share and times.min() == share // len(source) >= times.max() - 1
    short = r"an entry of DataConfig.path has 40002 tokens, fewer than one window"
    with pytest.raises(UserError, match=short):
        TokenStream(cache, sequence_length=50_000, batch_size=1, seed=0, weights=weights)


def test_held_out_batches_count_each_target_once(eight_held_out):
    batches = list(HeldOut(eight_held_out, 3).batches(2))
    # 7 targets: windows mnop, pqrs, s$ and one row of nothing to fill the second batch.
    assert [tokens.tolist() for tokens, *_ in batches] == [
        [[*b"mnop"], [*b"pqrs"]],
        [[ord("s"), END, 0, 0], [0, 0, 0, 0]],
    ]
    assert [weights.tolist() for _, weights, *_ in batches] == [[[1, 1, 1], [1, 1, 1]], [[1, 0, 0], [0, 0, 0]]]
    assert all(tokens.dtype == np.int32 and weights.dtype == np.float32 for tokens, weights, *_ in batches)
    # A "loss" of each target, its square: the mean over m..s$ without the first, whatever the windows.
    expected = np.mean(np.array([*b"nopqrs", END], np.float64) ** 2)
    for length, size in np.ndindex(11, 5):
        batches = list(HeldOut(eight_held_out, length + 1).batches(size + 1))
        total = sum((tokens[:, 1:].astype(np.float64) ** 2 * weights).sum() for tokens, weights, *_ in batches)
        assert total / sum(weights.sum() for _, weights, *_ in batches) == pytest.approx(expected, rel=1e-12)


def test_held_out_counts_and_entropy_are_those_of_the_targets_that_count(long, tmp_path):
    (tmp_path / "half").mkdir()
    half = corpus(tmp_path / "half", "xxxxxxxxbabac", 0.4)  # b a b a c $, of which the first is no target
    counts = HeldOut(half, 9).counts()  # a twice, b, c, $
    assert unigram_entropy(counts) == pytest.approx(0.4 * math.log(5 / 2) + 0.6 * math.log(5), rel=1e-12)
    for length, limit, end in ((7, 5, None), (500, 0, None), (7, 0, ord("7"))):  # a 7 as an end
        held_out = HeldOut(long, length, limit=limit)
        counted = [t[:, 1:][(w > 0) & (t[:, :-1] != (-1 if end is None else end))] for t, w, *_ in held_out.batches(4)]
        found = held_out.counts(end)
        np.testing.assert_array_equal(found, np.bincount(np.concatenate(counted), minlength=257))


def test_document_numbers_and_targets_by_hand():
    # 9 ends a document: one that the window cuts at its start, one of an end alone, one whole, one cut at the end
    tokens = np.array([[1, 2, 9, 9, 3, 9, 4, 5], [1, 2, 3, 4, 5, 6, 7, 8], [9, 1, 2, 3, 4, 5, 6, 9]])
    numbers, inside = document_numbers(tokens, 9), inside_documents(tokens, 9)
    assert numbers.dtype == np.int32
    assert numbers.tolist() == [[0, 0, 0, 1, 2, 2, 3, 3], [0] * 8, [0, 1, 1, 1, 1, 1, 1, 1]]
    assert inside.tolist() == [[1, 1, 0, 0, 1, 0, 1], [1] * 7, [0, 1, 1, 1, 1, 1, 1]]


def masked_one_by_one(tokens, step, rows, seed, tokenizer):
    inputs, weights = tokens.copy(), np.zeros(tokens.shape, np.float32)
    ordinary = sorted({*range(tokenizer.vocab_size)} - {tokenizer.mask_id, tokenizer.end_id, *tokenizer.front})
    for b, s in np.ndindex(tokens.shape):
        address = (int(rows[b]), s)
        if tokens[b, s] not in ordinary or uniform(2, seed, step, 0, *address)[0] >= stream.MASK_RATE:
            continue
        weights[b, s] = 1
        fate = uniform(2, seed, step, 1, *address)[0]
        if fate < 0.8:
            inputs[b, s] = tokenizer.mask_id
        elif fate < 0.9:
            inputs[b, s] = ordinary[int(hash64(2, seed, step, 2, *address)[0]) % len(ordinary)]
    return inputs, tokens, weights


def test_mask_tokens_equals_a_loop_and_depends_on_the_row_alone(monkeypatch):
    monkeypatch.setattr(stream, "MASK_RATE", 0.5)
    tokens = (np.arange(6 * 40).reshape(6, 40) * 7 % 12).astype(np.int32)
    tokenizer = types.SimpleNamespace(vocab_size=12, mask_id=11, end_id=7, front=(2,), back=())
    settings = {"step": 3, "seed": 5, "tokenizer": tokenizer}
    rows = np.arange(10, 16)
    found = mask_tokens(tokens, rows=rows, **settings)
    odd = mask_tokens(tokens[1::2], rows=rows[1::2], **settings)  # a host's rows need not follow one another
    for one, other, part in zip(found, masked_one_by_one(tokens, rows=rows, **settings), odd, strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(part, one[1::2])
        assert one.dtype == other.dtype
    assert (found[0] != tokens).sum() > 20
    same = np.full((6, 200), 5, np.int32)  # other rows, steps and seeds choose others
    keys = ((4, 1), (5, 1), (4, 0))
    chosen = [mask_tokens(same, step, np.arange(6), seed, ByteTokenizer())[2] for step, seed in keys]
    assert len({row.tobytes() for weights in chosen for row in weights}) == 18


def test_prefetch_keeps_the_order_and_reads_no_further_ahead_than_depth():
    def read(step):
        time.sleep(0.01 if step % 3 == 0 else 0)
        return step * 10

    assert list(prefetch(read, 4, 20)) == [(step, step * 10) for step in range(4, 20)]
    assert list(prefetch(read, 4, 4)) == []
    started = []
    batches = prefetch(lambda step: started.append(step) or step, 0, 99)
    for step in range(5):
        assert next(batches) == (step, step)
        assert max(started) <= step + 2
    batches.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]
    failing = prefetch(lambda step: {0: "a", 1: "b"}[step], 0, 99)
    assert [next(failing), next(failing)] == [(0, "a"), (1, "b")]
    with pytest.raises(KeyError, match="2"):  # where the batch would have come
        next(failing)

"""Windows by hand; an order that only the seed decides; held-out windows that count each target once."""

import math

import numpy as np
import pytest

from moe_jax.data import (
    ByteTokenizer,
    DataConfig,
    TokenStream,
    build_cache,
    held_out_batches,
    held_out_entropy,
    unigram_entropy,
)
from moe_jax.errors import UserError

END = ByteTokenizer.end_id


def corpus(tmp_path, text, fraction):
    (tmp_path / "t.txt").write_text(text)
    return build_cache(
        DataConfig(path=str(tmp_path / "t.txt"), cache_dir=str(tmp_path / "cache"), held_out_fraction=fraction)
    )


@pytest.fixture
def small(tmp_path):
    """Hold 12 tokens: a to j to train on, k and the end held out (0.2 of 12, rounded, are 2)."""
    return corpus(tmp_path, "abcdefghijk", 0.2)


@pytest.fixture
def long(tmp_path):
    """Hold 500 numbers as text; 2,391 tokens, 2,152 of them to train on."""
    return corpus(tmp_path, " ".join(map(str, range(500, 1000))) + " " + "x" * 390, 0.1)


def text_rows(batch):
    return [bytes(row.tolist()).decode() for row in batch]


def test_batch_windows_share_one_token_and_cover_an_epoch(small):
    stream = TokenStream(small, sequence_length=3, batch_size=3, seed=0)
    # 10 tokens make (10 - 1) // 3 = 3 windows: abc + d, def + g, ghi + j.
    assert stream.windows == 3
    for epoch in range(5):
        batch = stream.batch(epoch)
        assert batch.dtype == np.int32 and batch.shape == (3, 4)
        assert sorted(text_rows(batch)) == ["abcd", "defg", "ghij"]
        # Each token but the first is a target exactly once.
        assert sorted(bytes(batch[:, 1:].ravel().tolist())) == list(b"bcdefghij")


def test_batch_order_is_pinned(small):
    # Part of every checkpoint: a change here breaks old runs. Each is the oracle's shuffle of test_keyed_random.py, of
    # 9 items with the key (1, 17, epoch).
    stream = TokenStream(small, sequence_length=1, batch_size=9, seed=17)
    assert ["".join(row[0] for row in text_rows(stream.batch(step))) for step in range(3)] == [
        "hcbgfaedi",
        "aihbgcefd",
        "chiegbdaf",
    ]


def test_batch_does_not_cross_into_the_other_part(small):
    held_out = TokenStream(small, sequence_length=1, batch_size=1, seed=0, split="held_out")
    assert held_out.batch(0).tolist() == [[ord("k"), END]]


def test_batch_larger_than_the_corpus_wraps_across_epochs(small):
    stream = TokenStream(small, sequence_length=3, batch_size=7, seed=0)
    rows = text_rows(np.concatenate([stream.batch(step) for step in range(3)]))  # 21 rows: 7 epochs of 3 windows
    assert all(sorted(rows[i : i + 3]) == ["abcd", "defg", "ghij"] for i in range(0, 21, 3))


@pytest.mark.parametrize("hosts", [1, 2, 4, 8])
def test_batch_order_is_independent_of_the_number_of_readers(long, hosts):
    whole = TokenStream(long, sequence_length=16, batch_size=8, seed=3)
    readers = [TokenStream(long, sequence_length=16, batch_size=8, seed=3) for _ in range(hosts)]
    share = 8 // hosts
    for step in range(40):  # 320 rows of 134 windows: the second and the third epoch begin inside a batch
        parts = [reader.batch(step, slice(i * share, (i + 1) * share)) for i, reader in enumerate(readers)]
        np.testing.assert_array_equal(np.concatenate(parts), whole.batch(step))


def test_batch_resumes_at_any_step(long):
    uninterrupted = TokenStream(long, sequence_length=16, batch_size=8, seed=3)
    before = [uninterrupted.batch(step) for step in range(30)]
    for step in (29, 17, 0):
        resumed = TokenStream(long, sequence_length=16, batch_size=8, seed=3)
        np.testing.assert_array_equal(resumed.batch(step), before[step])


def test_batch_order_differs_by_seed_and_epoch_and_not_by_batch_size(long):
    def rows(seed, batch_size, count):
        stream = TokenStream(long, sequence_length=16, batch_size=batch_size, seed=seed)
        return np.concatenate([stream.batch(step) for step in range(count // batch_size)]).tolist()

    windows = TokenStream(long, sequence_length=16, batch_size=1, seed=3).windows
    one = rows(3, 1, 2 * windows)
    assert one == rows(3, 2, 2 * windows)
    assert one[:windows] != one[windows:] and sorted(one[:windows]) == sorted(one[windows:])
    assert one != rows(4, 1, 2 * windows)


def test_token_stream_refuses_a_corpus_shorter_than_a_window(small):
    TokenStream(small, sequence_length=9, batch_size=1, seed=0)
    with pytest.raises(
        UserError,
        match=r"the train part of the corpus has 10 tokens, fewer than one window of DataConfig.sequence_length \(10\) "
        r"\+ 1; set DataConfig.sequence_length to at most 9 or name more text",
    ):
        TokenStream(small, sequence_length=10, batch_size=1, seed=0)
    with pytest.raises(UserError, match=r"split \('test'\) must be 'train' or 'held_out'"):
        TokenStream(small, sequence_length=1, batch_size=1, seed=0, split="test")


def test_position_is_checked_on_resume(small, tmp_path):
    saved = TokenStream(small, sequence_length=3, batch_size=2, seed=0).position(5)
    assert (saved["step"], saved["epoch"]) == (5, 3)  # 10 rows, 3 windows an epoch
    TokenStream(small, sequence_length=3, batch_size=2, seed=0).check_position(saved)
    with pytest.raises(UserError, match=r"train.seed was 0 in the checkpoint and is 1 now"):
        TokenStream(small, sequence_length=3, batch_size=2, seed=1).check_position(saved)
    with pytest.raises(UserError, match=r"train.batch_size was 2 in the checkpoint and is 4 now"):
        TokenStream(small, sequence_length=3, batch_size=4, seed=0).check_position(saved)
    other = corpus(tmp_path, "abcdefghijkl", 0.2)
    with pytest.raises(UserError, match=r"DataConfig.path or DataConfig.tokenizer \(hash of the tokens\) was \w+ in"):
        TokenStream(other, sequence_length=3, batch_size=2, seed=0).check_position(saved)


@pytest.fixture
def eight_held_out(tmp_path):
    """Hold 20 tokens, the last 8 held out: m n o p q r s $."""
    return corpus(tmp_path, "abcdefghijklmnopqrs", 0.4)


def test_held_out_batches_count_each_target_once(eight_held_out):
    batches = list(held_out_batches(eight_held_out, sequence_length=3, batch_size=2))
    # 7 targets: windows mnop, pqrs, s$ and one row of nothing to fill the second batch.
    assert [batch.tokens.tolist() for batch in batches] == [
        [[*b"mnop"], [*b"pqrs"]],
        [[ord("s"), END, 0, 0], [0, 0, 0, 0]],
    ]
    assert [batch.weights.tolist() for batch in batches] == [[[1, 1, 1], [1, 1, 1]], [[1, 0, 0], [0, 0, 0]]]
    assert all(batch.tokens.dtype == np.int32 and batch.weights.dtype == np.float32 for batch in batches)


def test_held_out_batches_mean_is_exact_for_any_shape(eight_held_out):
    # A "loss" of each target, its square: the mean over m..s$ without the first, whatever the windows.
    expected = np.mean(np.array([*b"nopqrs", END], np.float64) ** 2)
    for length in range(1, 12):
        for size in range(1, 6):
            batches = list(held_out_batches(eight_held_out, sequence_length=length, batch_size=size))
            total = sum((batch.tokens[:, 1:].astype(np.float64) ** 2 * batch.weights).sum() for batch in batches)
            assert total / sum(batch.weights.sum() for batch in batches) == pytest.approx(expected, rel=1e-12)


def test_held_out_batches_limit_spreads_over_the_text(eight_held_out):
    def starts(limit):
        batches = held_out_batches(eight_held_out, sequence_length=1, batch_size=8, limit=limit)
        return [bytes([row[0]]).decode() for batch in batches for row in batch.tokens.tolist() if row[0]]

    # 7 windows of one target each; 3 of them begin at 0, 7 // 3 and 14 // 3.
    assert starts(3) == ["m", "o", "q"]
    assert starts(0) == starts(7) == starts(99) == list("mnopqrs")


def test_held_out_batches_rows_of_two_hosts_make_the_whole(eight_held_out):
    sizes = {"sequence_length": 3, "batch_size": 2}
    whole = list(held_out_batches(eight_held_out, **sizes))
    parts = [list(held_out_batches(eight_held_out, **sizes, rows=slice(i, i + 1))) for i in range(2)]
    assert [len(part) for part in parts] == [len(whole)] * 2  # the second host's last row is filling, but is there
    for batch, first, second in zip(whole, *parts, strict=True):
        np.testing.assert_array_equal(np.concatenate([first.tokens, second.tokens]), batch.tokens)
        np.testing.assert_array_equal(np.concatenate([first.weights, second.weights]), batch.weights)


def test_unigram_entropy_by_hand(small):
    # Shares 1/2, 1/4, 1/4: 1/2 ln 2 + 2 * 1/4 ln 4 = 1.5 ln 2.
    assert unigram_entropy(np.array([5, 5, 1, 2]), 8) == pytest.approx(1.5 * math.log(2), rel=1e-12)
    assert unigram_entropy(np.array([3, 3, 3]), 8) == 0
    assert unigram_entropy(small.train, 258) == pytest.approx(math.log(10), rel=1e-12)  # ten letters, once each


def test_held_out_entropy_is_that_of_the_targets_that_count(long):
    for length, limit in ((16, 0), (7, 5), (500, 0)):
        batches = list(held_out_batches(long, sequence_length=length, batch_size=4, limit=limit))
        targets = np.concatenate([batch.tokens[:, 1:][batch.weights > 0] for batch in batches])
        found = held_out_entropy(long, sequence_length=length, vocab_size=258, limit=limit)
        assert found == pytest.approx(unigram_entropy(targets, 258), rel=1e-12)


def test_held_out_entropy_without_what_follows_an_end(tmp_path):
    cache, space = corpus(tmp_path, "ab cde f" * 40, 0.3), ord(" ")  # a space in the place of an end
    batches = list(held_out_batches(cache, sequence_length=7, batch_size=4))
    inside = [b.tokens[:, 1:][(b.weights > 0) & (b.tokens[:, :-1] != space)] for b in batches]
    found = held_out_entropy(cache, sequence_length=7, vocab_size=258, boundary_id=space)
    assert found == pytest.approx(unigram_entropy(np.concatenate(inside), 258), rel=1e-12)
    assert found != pytest.approx(held_out_entropy(cache, sequence_length=7, vocab_size=258), rel=1e-3)

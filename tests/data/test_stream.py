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


def test_batch_order_is_independent_of_the_number_of_readers(long, hosts=8):
    whole = TokenStream(long, sequence_length=16, batch_size=8, seed=3)
    readers = [TokenStream(long, sequence_length=16, batch_size=8, seed=3) for _ in range(hosts)]
    share = 8 // hosts
    for step in range(40):  # 320 rows of 134 windows: the second and the third epoch begin inside a batch
        parts = [reader.batch(step, slice(i * share, (i + 1) * share)) for i, reader in enumerate(readers)]
        np.testing.assert_array_equal(np.concatenate(parts), whole.batch(step))


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
    assert [tokens.tolist() for tokens, _ in batches] == [
        [[*b"mnop"], [*b"pqrs"]],
        [[ord("s"), END, 0, 0], [0, 0, 0, 0]],
    ]
    assert [weights.tolist() for _, weights in batches] == [[[1, 1, 1], [1, 1, 1]], [[1, 0, 0], [0, 0, 0]]]
    assert all(tokens.dtype == np.int32 and weights.dtype == np.float32 for tokens, weights in batches)


def test_held_out_batches_mean_is_exact_for_any_shape(eight_held_out):
    # A "loss" of each target, its square: the mean over m..s$ without the first, whatever the windows.
    expected = np.mean(np.array([*b"nopqrs", END], np.float64) ** 2)
    for length in range(1, 12):
        for size in range(1, 6):
            batches = list(held_out_batches(eight_held_out, sequence_length=length, batch_size=size))
            total = sum((tokens[:, 1:].astype(np.float64) ** 2 * weights).sum() for tokens, weights in batches)
            assert total / sum(weights.sum() for _, weights in batches) == pytest.approx(expected, rel=1e-12)


def test_held_out_batches_limit_spreads_over_the_text(eight_held_out):
    def starts(limit):
        batches = held_out_batches(eight_held_out, sequence_length=1, batch_size=8, limit=limit)
        return [bytes([row[0]]).decode() for tokens, _ in batches for row in tokens.tolist() if row[0]]

    # 7 windows of one target each; 3 of them begin at 0, 7 // 3 and 14 // 3.
    assert starts(3) == ["m", "o", "q"]
    assert starts(0) == starts(7) == starts(99) == list("mnopqrs")


def test_held_out_entropy_is_that_of_the_targets_that_count(long, tmp_path):
    (tmp_path / "half").mkdir()
    half = corpus(tmp_path / "half", "xxxxxxxxbabac", 0.4)  # b a b a c $, of which the first is no target
    found = held_out_entropy(half, sequence_length=9, vocab_size=258)
    assert found == pytest.approx(0.4 * math.log(5 / 2) + 0.6 * math.log(5), rel=1e-12)  # a twice, b, c, $
    for length, limit, end in ((16, 0, None), (7, 5, None), (500, 0, None), (7, 0, ord("7"))):  # a 7 as an end
        batches = held_out_batches(long, sequence_length=length, batch_size=4, limit=limit)
        counted = [t[:, 1:][(w > 0) & (t[:, :-1] != (-1 if end is None else end))] for t, w in batches]
        shares = np.unique(np.concatenate(counted), return_counts=True)[1] / sum(map(len, counted))
        found = held_out_entropy(long, sequence_length=length, vocab_size=258, limit=limit, boundary_id=end)
        assert found == pytest.approx(-(shares * np.log(shares)).sum(), rel=1e-12)

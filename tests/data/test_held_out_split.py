"""Which documents are held out, by hand; and runs of tokens read as one array."""

import numpy as np
import pytest

from moe_jax.data.cache import TokenSpan, split_documents, uniform
from moe_jax.errors import UserError


def spread(runs):
    return [i for start, stop in runs.tolist() for i in range(start, stop)]


def test_split_documents_follows_the_hash_of_the_index():
    # 200 documents of 10 tokens: document i is tokens 10 i to 10 i + 9.
    train, held_out = split_documents(np.arange(1, 201) * 10, 0.1)
    chosen = [i for i in range(200) if float(uniform(3, i)[0]) < 0.1]
    assert 10 <= len(chosen) <= 40
    assert spread(held_out) == [10 * i + j for i in chosen for j in range(10)]
    assert sorted(spread(train) + spread(held_out)) == list(range(2000))


def test_split_documents_of_few_or_uneven_documents_holds_out_the_tail():
    # Two documents: one of them would be half of the text, far from 0.05.
    assert split_documents(np.array([50, 100]), 0.05)[1].tolist() == [[95, 100]]
    # 200 documents as above, but document `chosen` holds 10,000 tokens instead of 10.
    chosen = next(i for i in range(200) if float(uniform(3, i)[0]) < 0.1)
    sizes = np.full(200, 10)
    sizes[chosen] = 10_000
    assert split_documents(np.cumsum(sizes), 0.1)[1].tolist() == [[11990 - 1199, 11990]]


def test_split_documents_never_leaves_a_part_empty():
    for documents in range(1, 12):
        for size in (4, 7, 1000):
            train, held_out = split_documents(np.arange(1, documents + 1) * size, 0.02)
            assert len(spread(held_out)) >= 2 and len(spread(train)) >= 2


def test_split_documents_refuses_three_tokens():
    with pytest.raises(UserError, match=r"the corpus has 3 tokens and must have at least 4; name more text"):
        split_documents(np.array([3]), 0.1)


def test_token_span_read_equals_joined_runs():
    tokens = np.arange(100, 130).astype("<u2")
    runs = np.array([[2, 5], [9, 10], [20, 26]])  # 3 + 1 + 6 tokens
    joined = [102, 103, 104, 109, 120, 121, 122, 123, 124, 125]
    span = TokenSpan(tokens, runs)
    assert len(span) == 10
    for start in range(11):
        for stop in range(start, 13):
            found = span.read(start, stop)
            assert found.tolist() == joined[start:stop] and found.dtype == np.int32

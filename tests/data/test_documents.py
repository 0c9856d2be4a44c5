"""Which document of its window a token is of, by hand."""

import numpy as np

from moe_jax.data.stream import document_numbers, inside_documents

# 9 ends a document: one that the window cuts at its start, one of an end alone, one whole, one cut at the end
TOKENS = np.array([[1, 2, 9, 9, 3, 9, 4, 5], [1, 2, 3, 4, 5, 6, 7, 8], [9, 1, 2, 3, 4, 5, 6, 9]])


def test_numbers_and_targets_by_hand():
    numbers = document_numbers(TOKENS, 9)
    assert numbers.dtype == np.int32
    assert numbers.tolist() == [[0, 0, 0, 1, 2, 2, 3, 3], [0] * 8, [0, 1, 1, 1, 1, 1, 1, 1]]
    inside = inside_documents(TOKENS, 9)
    assert inside.tolist() == [[1, 1, 0, 0, 1, 0, 1], [1] * 7, [0, 1, 1, 1, 1, 1, 1]]
    # a target counts exactly where its document is that of the token before it
    np.testing.assert_array_equal(inside, numbers[:, 1:] == numbers[:, :-1])

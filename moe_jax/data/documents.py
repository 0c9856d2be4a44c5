"""Which document of its window each token is in, for a model that keeps packed documents apart.

Inputs: windows of token ids [b, n] and the id that ends a document. Outputs: int32 [b, n], numbers of documents that
count from 0 in each window. A document ends with its end id, which is its last token; one that the window cuts begins
or ends with the window.
Letters: docs/notation.md.
"""

from collections.abc import Sequence

import numpy as np


def document_numbers(tokens: np.ndarray, end_id: int) -> np.ndarray:
    """Return the number of each token's document in its window: how many ends of documents precede it there.

    Args:
      tokens: integers [b, n]; of a masked language model, before any is hidden.
      end_id: that closes each document; it is part of the document it closes.

    Returns:
      int32 [b, n], ascending along n.
    """
    ends = tokens == end_id
    return (np.cumsum(ends, axis=1) - ends).astype(np.int32)


def inside_documents(tokens: np.ndarray, end_id: int) -> np.ndarray:
    """Return which targets are in the document of the token that predicts them, bool [b, n - 1] of tokens [b, n].

    The end of a document is such a target; the first token of the document after it is none.
    """
    return tokens[:, :-1] != end_id


def cut_documents(ids: Sequence[int], end_id: int) -> list[list[int]]:
    """Return the documents of a window one by one, each with its end id where it has one."""
    cuts = [place + 1 for place, one in enumerate(ids) if one == end_id and place + 1 < len(ids)]
    return [list(ids[first:last]) for first, last in zip([0, *cuts], [*cuts, len(ids)], strict=True)]

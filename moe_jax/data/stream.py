"""Windows of tokens by step: what a training step and an evaluation read. Letters: docs/notation.md.

Windows are int32 [b, Sq + 1]; row[:-1] are inputs and row[1:] their targets. Documents are packed one after the other.
Windows of conversations hold whole ones, of marked ids (chat.py), and may be shorter; so may the last one of a text.
"""

# Windows lie Sq apart and share one token, so each token is a target once an epoch, but for the first and the fewer
# than Sq that fill no window at the end. A batch is a function of (corpus, sequence_length, batch_size, seed, step), so
# the order cannot depend on hosts, devices or threads, and a resumed run needs its step only; one whose batch size or
# text was changed on the way also needs how many windows were read before.

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from moe_jax.data.cache import TokenCache, TokenSpan, hash64, shuffled, uniform
from moe_jax.data.chat import ANSWER, ID_BITS
from moe_jax.data.tokenizer import Tokenizer
from moe_jax.errors import UserError

_ORDER, _MASKS, _MIXTURE = 1, 2, 4  # keyed numbers for one purpose are apart from those for another; cache.py has 3


_BLOCK = 1000  # windows in which a mixture has its shares, to a thousandth


def _quotas(weights: Sequence[float]) -> list[int]:
    """Return how many of _BLOCK windows each weight gets, by largest remainders; at least one where it is not 0."""
    exact = np.asarray(weights, np.float64) / sum(weights) * _BLOCK
    quotas = np.maximum(np.floor(exact), exact > 0).astype(np.int64)
    order = np.argsort(quotas - exact, kind="stable")
    while (left := _BLOCK - int(quotas.sum())) > 0:
        quotas[order[:left]] += 1
    while quotas.sum() > _BLOCK:  # many tiny weights took their one
        quotas[np.argmax(quotas)] -= 1
    return quotas.tolist()


class TextWindows:
    """The windows of a span of tokens: Sq apart, sharing one token, the last one shorter where `short`."""

    def __init__(self, span: TokenSpan, sequence_length: int, *, short: bool = False):
        self._span, self._length = span, sequence_length
        self._targets = max(0, len(span) - 1)
        self._count = -(-self._targets // sequence_length) if short else self._targets // sequence_length

    def __len__(self) -> int:
        return self._count

    def sizes(self, windows: np.ndarray) -> np.ndarray:
        """Return how many ids windows [n] hold, int64 [n]."""
        return np.minimum(self._targets - windows * self._length, self._length) + 1

    def read(self, window: int) -> np.ndarray:
        """Return a window's ids, int32 [Sq + 1] or fewer."""
        start = window * self._length
        return self._span.read(start, start + self._length + 1)


class ChatWindows:
    """Windows of the conversations of a span, each in one of them, cut where it is longer.

    By best fit, longest first, which depends on the lengths alone. A UserError where a cut leaves nothing to learn.

    Attributes:
      tokens: that windows hold, of conversations; cut: conversations that are cut; lost: tokens of answers behind cuts.
    """

    def __init__(self, cache: TokenCache, span: TokenSpan, sequence_length: int, *, packed: bool):
        """packed: as many as fit into a window, else one in each."""
        self._ids, self._length = cache.tokens, sequence_length + 1
        starts = np.concatenate([[0], cache.ends[:-1]])
        # the end of the last run that begins at or before each
        inside = starts < np.append(0, span.runs[:, 1])[np.searchsorted(span.runs[:, 0], starts, side="right")]
        starts, ends, number = starts[inside], cache.ends[inside], np.flatnonzero(inside)
        sizes = np.minimum(ends - starts, self._length)
        self.cut, self.lost = int(np.count_nonzero(sizes < ends - starts)), 0
        for at in np.flatnonzero(sizes < ends - starts):
            answer = np.asarray(cache.tokens[starts[at] : ends[at]]) & ANSWER > 0
            if not answer[: self._length].any():
                raise UserError(
                    f"conversation {number[at] + 1} of DataConfig.path has its first answer behind "
                    f"{np.argmax(answer)} tokens, and is cut after DataConfig.sequence_length ({sequence_length}) + 1; "
                    f"set DataConfig.sequence_length to at least {np.argmax(answer)}, or remove the conversation"
                )
            self.lost += int(np.count_nonzero(answer[self._length :]))
        places = list(zip(starts.tolist(), (starts + sizes).tolist(), strict=True))
        # where several share a window all their tokens are inputs, as each one's are alone in a longer window
        fitted = _fit(sizes, sequence_length if packed else 0)
        self._pieces = [[places[at] for at in box] for box in fitted]
        self._sizes = np.array([sizes[box].sum() for box in fitted], np.int64)
        self.tokens = int(sizes.sum())

    def __len__(self) -> int:
        return len(self._pieces)

    def sizes(self, windows: np.ndarray) -> np.ndarray:
        """Return how many ids windows [n] hold, int64 [n]."""
        return self._sizes[windows]

    def read(self, window: int) -> np.ndarray:
        """Return a window's marked ids, int32 [Sq + 1] or fewer."""
        return np.concatenate([self._ids[start:end] for start, end in self._pieces[window]])


def _fit(sizes: np.ndarray, room: int) -> list[list[int]]:
    """Return which items share a box of size `room`, ascending within each, by best fit, longest first.

    One that is larger than a box has one for itself.
    """
    boxes: list[list[int]] = []
    with_space: dict[int, list[int]] = {}  # space that is left -> boxes
    spaces: list[int] = []  # the keys, ascending
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        place = bisect.bisect_left(spaces, size)
        if place == len(spaces):
            box, space = len(boxes), room
            boxes.append([])
        else:
            space = spaces[place]
            box = with_space[space].pop()
            if not with_space[space]:
                del with_space[space], spaces[place]
        boxes[box].append(item)
        if space > size:
            if space - size not in with_space:
                bisect.insort(spaces, space - size)
            with_space.setdefault(space - size, []).append(box)
    return [sorted(box) for box in boxes]


def windows_of(
    cache: TokenCache, span: TokenSpan, sequence_length: int, *, packed: bool, short: bool = False
) -> TextWindows | ChatWindows:
    """Return the windows of a span of a cache, of conversations where it holds such.

    Args:
      packed: as many conversations as fit into a window, else one; short: the last window of a text may be shorter.
    """
    if cache.meta.answers:
        return ChatWindows(cache, span, sequence_length, packed=packed)
    return TextWindows(span, sequence_length, short=short)


MASK_RATE = 0.15  # BERT's part of the tokens that are hidden


def mask_tokens(
    tokens: np.ndarray, step: int, rows: np.ndarray, seed: int, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hide `MASK_RATE` of the tokens: 80% become the mask, 10% a random token, and 10% stay as they are.

    Ends of documents, and special tokens around them, are neither hidden nor drawn.

    Args:
      tokens: integers [b, Sq]; rows: the global row of each, int [b].

    Returns:
      inputs int32 [b, Sq], with some hidden; targets int32 [b, Sq], the tokens as they were; weights float32 [b, Sq], 1
      where a token was chosen and the loss counts, else 0.

    Source: Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers" (2018), section 3.1.
    """
    row = rows[:, None]
    column = np.arange(tokens.shape[1])[None, :]
    special = np.unique([tokenizer.mask_id, tokenizer.end_id, *tokenizer.front, *tokenizer.back])

    chosen = (uniform(_MASKS, seed, step, 0, row, column) < MASK_RATE) & ~np.isin(tokens, special)
    fate = uniform(_MASKS, seed, step, 1, row, column)
    ordinary = np.uint64(tokenizer.vocab_size - special.size)
    drawn = (hash64(_MASKS, seed, step, 2, row, column) % ordinary).astype(np.int64)
    for skipped in special:  # ascending, so that each id that is not special is reached exactly once
        drawn += drawn >= skipped

    inputs = np.where(chosen & (fate < 0.8), tokenizer.mask_id, tokens)
    inputs = np.where(chosen & (fate >= 0.8) & (fate < 0.9), drawn, inputs)
    return inputs.astype(np.int32), tokens.astype(np.int32), chosen.astype(np.float32)


def token_numbers(sizes: np.ndarray, length: int, rows: np.ndarray, none: int) -> np.ndarray:
    """Number the tokens that rows of windows hold: int32 [b, Sq], `none` behind the last token of a row.

    Args:
      sizes: int64 [B], ids that the window of each row holds; length: Sq; rows: int [b], which of the B.
    """
    inputs, column = np.minimum(sizes, length), np.arange(length)
    first = np.cumsum(inputs) - inputs
    return np.where(column < inputs[rows, None], first[rows, None] + column, none).astype(np.int32)


def document_numbers(tokens: np.ndarray, end_id: int) -> np.ndarray:
    """Return how many ends of documents precede each token in its window, the number of its document: int32 [b, n].

    Args:
      tokens: integers [b, n]; of a masked language model, before any is hidden.
      end_id: that closes each document; it is part of the document it closes.
    """
    ends = tokens == end_id
    return (np.cumsum(ends, axis=1) - ends).astype(np.int32)


def inside_documents(tokens: np.ndarray, end_id: int) -> np.ndarray:
    """Return which targets are in the document of the token that predicts them, bool [b, n - 1] of tokens [b, n].

    The end of a document is such a target; the first token of the document after it is none.
    """
    return tokens[:, :-1] != end_id


class TokenStream:
    """Give the batch of any step, in an order shuffled anew each epoch.

    Row r of step s is window number s B + r of an endless sequence of epochs, so a batch (B rows over all hosts) may
    cross from one epoch into the next and may be larger than the corpus. After `resume` with another B it goes on from
    the window after the last one read. A UserError where the training part is shorter than one window.
    """

    def __init__(
        self, cache: TokenCache, *, sequence_length: int, batch_size: int, seed: int, weights: Sequence[float] = (),
        packed: bool = False,
    ):  # fmt: skip
        """weights: of the entries of the path in a mixture, () for none; packed: as of `windows_of`."""
        spans = cache.train_entries if weights else [cache.train]
        quotas = _quotas(weights or (1.0,))
        used = [(span, quota) for span, quota in zip(spans, quotas, strict=True) if quota]
        self._sources = [windows_of(cache, span, sequence_length, packed=packed) for span, _ in used]
        # windows of an epoch of each part
        self.windows = [len(source) for source in self._sources]
        if not min(self.windows):
            shortest = min(len(span) for span, _ in used)
            where = "an entry of DataConfig.path" if weights else "the corpus"
            raise UserError(
                f"the train part of {where} has {shortest} tokens, fewer than one window of "
                f"DataConfig.sequence_length ({sequence_length}) + 1; set DataConfig.sequence_length to at most "
                f"{max(1, shortest - 1)} or name more text in DataConfig.path"
            )
        self._quotas = [quota for _, quota in used]  # rows of each part among each _BLOCK of a mixture
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.seed = seed
        self._content = cache.meta.content + (f" {tuple(weights)}" if weights else "")
        self._before = 0  # windows that were read before the step 0 that these sizes would have had

    def batch(self, step: int, rows: slice | np.ndarray | None = None) -> np.ndarray:
        """Return rows of a step (from 0), int32 [b, Sq + 1]: those of the B global ones that `rows` picks, or all."""
        row = np.arange(self.batch_size, dtype=np.int64)[slice(None) if rows is None else rows]
        out = np.zeros((row.size, self.sequence_length + 1), np.int32)
        for source, places, windows in self._windows(step, row):
            for i, window in zip(places.tolist(), windows.tolist(), strict=True):
                ids = source.read(window)
                out[i, : ids.size] = ids
        return out

    def sizes(self, step: int) -> np.ndarray:
        """Return how many ids each row of a step holds, int64 [B]; behind them `batch` has zeros."""
        out = np.empty(self.batch_size, np.int64)
        for source, places, windows in self._windows(step, np.arange(self.batch_size, dtype=np.int64)):
            out[places] = source.sizes(windows)
        return out

    def _windows(self, step: int, row: np.ndarray) -> Iterator[tuple]:
        """Yield (its windows, places int [n] in `row`, the window of each int64 [n]) of each part of the mixture."""
        number = self._before + step * self.batch_size + row  # of windows since the first step
        part = np.zeros_like(number)
        if len(self._quotas) > 1:  # each _BLOCK of windows in a row has the quota of each, in an order of its own
            block, place = np.divmod(number, _BLOCK)
            slot, ends = shuffled(place, _BLOCK, _MIXTURE, self.seed, block), np.cumsum(self._quotas)
            part = np.searchsorted(ends, slot, side="right")
            quota = np.asarray(self._quotas)[part]
            number = block * quota + slot - (ends[part] - quota)  # among those of its part
        for which, (source, windows) in enumerate(zip(self._sources, self.windows, strict=True)):
            places = np.flatnonzero(part == which)
            epoch, place = np.divmod(number[places], windows)
            yield source, places, shuffled(place, windows, _ORDER, self.seed, epoch)

    def told(self) -> str:
        """Return in words how conversations lie in the windows, '' of text."""
        chats = [source for source in self._sources if isinstance(source, ChatWindows)]
        if not chats:
            return ""
        room = sum(self.windows) * (self.sequence_length + 1)
        cut, lost = sum(chat.cut for chat in chats), sum(chat.lost for chat in chats)
        return (
            f"{sum(self.windows):,} windows, {sum(chat.tokens for chat in chats) / room:.0%} of them conversations; "
            f"{cut:,} conversations are cut, with {lost:,} tokens of answers behind the cuts"
        )

    def position(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint keeps about the data before `step`: plain values, for JSON."""
        read = self._before + step * self.batch_size
        return {
            "step": step,
            "epoch": read // sum(self.windows),
            "windows_read": read,
            "content": self._content,
            "sequence_length": self.sequence_length,
            "batch_size": self.batch_size,
            "seed": self.seed,
        }

    def resume(self, saved: dict[str, Any], changed: Collection[str] = ()) -> None:
        """Go on after the windows that a checkpoint's run has read, or in other text from its first window.

        Args:
          saved: what `position` returned.
          changed: bindings that were changed on purpose.

        Raises:
          UserError: the next batch would be another one, and not on purpose.
        """
        bindings = {
            "content": "DataConfig.path, DataConfig.weights or DataConfig.tokenizer (hash of the tokens)",
            "sequence_length": "DataConfig.sequence_length",
            "batch_size": "train.batch_size",
            "seed": "train.seed",
        }
        now = self.position(0)
        other_text = saved.get("content") != now["content"]
        for key, binding in bindings.items():
            if saved.get(key) != now[key] and not any(name in binding for name in changed):
                raise UserError(
                    f"{binding} was {saved.get(key)} in the checkpoint and is {now[key]} now, so the data would not "
                    "go on where it stopped; set it back, or start a new run with --init_from"
                )
        read = saved.get("windows_read", saved["step"] * saved["batch_size"])
        self._before = (0 if other_text else read) - saved["step"] * self.batch_size


class HeldOut:
    """The windows of held-out text that evaluations read, always the same.

    Without a limit each held-out token but the first is a target once. With one, that many windows are taken, spread
    evenly over the held-out text. Of conversations, targets that are marked as answers count.
    """

    def __init__(self, cache: TokenCache, sequence_length: int, *, limit: int = 0, packed: bool = False):
        """limit: the most windows, 0 for all; packed: as of `windows_of`."""
        self._cache, self._length = cache, sequence_length
        self._source = windows_of(cache, cache.held_out, sequence_length, packed=packed, short=True)
        count = len(self._source)
        taken = min(limit, count) if limit else count
        self.windows = np.arange(taken) * count // taken  # int64 [n]

    def are_full(self) -> bool:
        """Say whether every window has ids for all Sq inputs."""
        return bool(self._source.sizes(self.windows).min() >= self._length)

    def batches(
        self, batch_size: int, rows: slice | np.ndarray = slice(None)
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
        """Yield (tokens, weights, windows, sizes) of the text in its order, every batch of the same shape.

        tokens is int32 [b, Sq + 1], 0 where there is none; weights is float32 [b, Sq], 1 for each target that counts,
        else 0. Sum of weighted losses over sum of weights, both over all batches and hosts, is the exact mean. windows
        and sizes are int64 [B], of all rows: the number of each one's window, -1 for none, and how many ids that holds.

        Args:
          batch_size: B, over all hosts; the last batch is filled up with rows of weight 0.
          rows: which b of the B global rows. All hosts get the same number of batches.
        """
        for first in range(0, len(self.windows), batch_size):
            windows = np.full(batch_size, -1, np.int64)
            windows[: len(self.windows) - first] = self.windows[first : first + batch_size]
            sizes = np.where(windows < 0, 0, self._source.sizes(np.maximum(windows, 0)))
            numbers = windows[rows]
            tokens = np.zeros((numbers.size, self._length + 1), np.int32)
            weights = np.zeros((numbers.size, self._length), np.float32)
            for i, window in enumerate(numbers.tolist()):
                if window >= 0:
                    ids = self._source.read(window)
                    tokens[i, : ids.size] = ids
                    weights[i, : ids.size - 1] = ids[1:] & ANSWER > 0 if self._cache.meta.answers else 1
            yield tokens, weights, windows, sizes

    def counts(self, boundary_id: int | None = None) -> np.ndarray:
        """Return how often each id is one of the targets that count, int64 [largest id + 1].

        Args:
          boundary_id: the id after which a target does not count, where documents are kept apart.
        """
        counts = np.zeros(self._cache.meta.max_id + 1, np.int64)
        for tokens, weights, *_ in self.batches(64):
            counted = weights > 0 if boundary_id is None else (weights > 0) & inside_documents(tokens, boundary_id)
            counts += np.bincount(tokens[:, 1:][counted] & ID_BITS, minlength=counts.size)
        return counts


def unigram_entropy(counts: np.ndarray) -> float:
    """Return the entropy, in nats, of ids that occur so often.

    No model that ignores context can have a lower held-out loss, not even one fitted to the held-out text itself.
    """
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def prefetch(read: Callable[[int], Any], start: int, stop: int) -> Iterator[tuple[int, Any]]:
    """Yield (step, read(step)) from `start` to before `stop`; up to two steps are read ahead, in a thread.

    An error of read(step) is raised where that step would have been yielded. To end the thread, close the iterator or
    exhaust it.
    """
    pool, ahead = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch"), []
    try:
        for step in range(start, stop):
            ahead += [pool.submit(read, later) for later in range(step + len(ahead), min(step + 3, stop))]
            yield step, ahead.pop(0).result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)

"""A corpus as one memory-mapped array of token ids, built by the first process, whole or not at all.

A cache is a folder `tokens-<fingerprint>` with tokens.bin (ids, each document with the tokenizer's front, back and
end_id; of conversations what chat.py makes of them, marked), documents.bin (where each document ends) and meta.json.
"""

# It is written in a folder of another name, synced, and renamed: the rename is what makes it a cache, so a killed
# builder leaves nothing that could be taken for one, and of several builders (on several hosts, too) the first to
# rename wins.

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from absl import logging

from moe_jax.data import user_cache
from moe_jax.data.chat import ANSWER, ID_BITS, ChatTemplate
from moe_jax.data.corpus import DataConfig, Source, find_documents
from moe_jax.data.tokenizer import Tokenizer, build_tokenizer
from moe_jax.errors import UserError

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = 6


def hash64(*words) -> np.ndarray:
    """Hash ints or integer arrays that broadcast together to uint64, at least 1-d, that look independent.

    Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators" (2014), figure 13 (mix64variant13).
    """
    # each word is mixed with the hash of the words before it by the finaliser of SplitMix64
    state = np.zeros(1, np.uint64)
    for word in words:
        word = np.array([word & 0xFFFFFFFFFFFFFFFF], np.uint64) if isinstance(word, int) else word.astype(np.uint64)
        state = state * np.uint64(3) + word + _GOLDEN
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state


def uniform(*words) -> np.ndarray:
    """Return float64 numbers in [0, 1) at the addresses that the words give."""
    return (hash64(*words) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def shuffled(index: np.ndarray, count: int, *key) -> np.ndarray:
    """Return which item of `count` stands at each place of a shuffled order, int64 [n], without making the order.

    Args:
      index: int64 [n], places, each in [0, count).
      key: words of `hash64`; an array among them has the shape [n].

    Source: Black, Rogaway, "Ciphers with Arbitrary Finite Domains" (2002), cycle walking and generalised Feistel.
    """
    # A Feistel network is a bijection of [0, 4^k); applying it again until the value is below `count` makes it one of
    # [0, count). That takes at most four applications on average, and no memory whatever the size of the corpus.
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    low = (np.uint64(1) << half) - np.uint64(1)

    value, outside = index.astype(np.uint64), np.arange(index.size)
    while outside.size:
        keys = [word if isinstance(word, int) else word[outside] for word in key]
        left, right = value[outside] >> half, value[outside] & low
        for turn in range(_ROUNDS):
            left, right = right, left ^ (hash64(*keys, turn, right) & low)
        value[outside] = (left << half) | right
        outside = np.flatnonzero(value >= np.uint64(count))
    return value.astype(np.int64)


_DOCUMENTS = 1 << 20  # that are hashed at once
_PURPOSE = 3  # keeps these numbers apart from the other purposes in stream.py


def split_documents(
    ends: np.ndarray, held_out_fraction: float, *, whole: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Divide a corpus, whose documents end before `ends` (int64 [documents]), between training and held-out text.

    Args:
      whole: cut no document.

    Returns (train, held_out), int64 [runs, 2] each: start and end of each run of tokens, ascending; no token in both.
    """
    # Whether a document is held out is decided by a hash of its index, not by the seed or by the documents after it.
    # Where the documents so chosen hold less than half or more than twice the share that was asked for (few documents,
    # or one that outweighs the rest), the last tokens of the corpus are held out instead.
    total = int(ends[-1])
    if total < 4:
        raise UserError(f"the corpus has {total} tokens and must have at least 4; name more text in DataConfig.path")
    is_held_out = np.empty(ends.size, bool)
    for first in range(0, ends.size, _DOCUMENTS):  # so that the hashes of many documents need little memory
        index = np.arange(first, min(first + _DOCUMENTS, ends.size))
        is_held_out[index] = uniform(_PURPOSE, index) < held_out_fraction
    border = np.flatnonzero(np.diff(is_held_out, prepend=not is_held_out[0]))
    starts = np.where(border, ends[border - 1], 0)
    runs, is_held_out = np.stack([starts, np.append(starts[1:], total)], axis=1), is_held_out[border]
    count = int((runs[is_held_out, 1] - runs[is_held_out, 0]).sum())
    if count >= 2 and held_out_fraction / 2 <= count / total <= min(2 * held_out_fraction, 0.5):
        return runs[~is_held_out], runs[is_held_out]
    tail = max(2, round(total * held_out_fraction))  # two tokens make one target
    if whole:
        if ends.size < 2:
            raise UserError("DataConfig.path holds one conversation, and one is held out; name at least two")
        tail = total - int(ends[max(1, np.searchsorted(ends[:-1], total - tail, side="right")) - 1])
    return np.array([[0, total - tail]]), np.array([[total - tail, total]])


class TokenSpan:
    """Read some runs (starts and ends, int64 [runs, 2]) of the corpus (ids [n]) as one array of tokens."""

    def __init__(self, tokens: np.ndarray, runs: np.ndarray):
        self._tokens = tokens
        self.runs = runs
        self._ends = np.cumsum(runs[:, 1] - runs[:, 0])

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._ends.size else 0

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens start to before stop, int32; fewer where the span ends earlier."""
        stop = min(stop, len(self))
        parts, run = [], int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            here = min(stop, int(self._ends[run])) - start
            first = int(self.runs[run, 1] - self._ends[run]) + start
            parts.append(self._tokens[first : first + here])
            start += here
            run += 1
        return np.concatenate(parts).astype(np.int32) if parts else np.zeros(0, np.int32)


FORMAT = 4  # of the folder; another number is another fingerprint
BATCH_CHARACTERS = 4 << 20  # text handed to the tokenizer at once
ABANDONED_SECONDS = 3600.0  # a builder's folder in which nothing was written for so long has no builder
TOLD_EVERY = 10.0  # seconds between two lines that say how far a build is


@dataclass(frozen=True, kw_only=True)
class CacheMeta:
    """Say what a cache holds; the text of meta.json."""

    tokenizer: str  # its name
    dtype: str  # of tokens.bin, '<u2' or '<u4'
    tokens: int  # ids in tokens.bin, ends of documents included
    documents: int  # with any text
    max_id: int  # the largest in tokens.bin
    entries: list[int]  # tokens up to the end of each entry of DataConfig.path
    content: str  # a hash of the ids and the ends of the documents, equal on any two machines with the same text
    answers: int = 0  # tokens of conversations that are targets; 0 of text


class TokenCache:
    """Hold the ids of a corpus, memory-mapped, and which of them are held out."""

    def __init__(self, folder: Path, meta: CacheMeta, held_out_fraction: float):
        self.meta = meta
        self.tokens = np.memmap(folder / "tokens.bin", np.dtype(meta.dtype), "r")  # uint16 or uint32 [meta.tokens]
        # int64 [meta.documents], one past the last token of each
        self.ends = np.memmap(folder / "documents.bin", np.dtype("<i8"), "r")
        train, held_out = split_documents(self.ends, held_out_fraction, whole=meta.answers > 0)
        self.train, self.held_out = TokenSpan(self.tokens, train), TokenSpan(self.tokens, held_out)
        borders = [0, *meta.entries]
        # the part of each entry of the path that is trained on
        self.train_entries = [
            TokenSpan(self.tokens, np.clip(train[(train[:, 0] < end) & (train[:, 1] > start)], start, end))
            for start, end in zip(borders, meta.entries, strict=False)
        ]


def build_cache(config: DataConfig, tokenizer: Tokenizer | None = None, *, vocab_size: int | None = None) -> TokenCache:
    """Open the token cache of a corpus; build it first where it is missing or damaged.

    Any number of processes may call this at once.

    Args:
      tokenizer: what config.tokenizer names; None builds it.
      vocab_size: the model's; None leaves it unchecked.

    Raises:
      UserError: missing, empty or unreadable text, a folder that cannot be written, or a token outside the vocabulary.
    """
    tokenizer = tokenizer or build_tokenizer(config)
    sources = find_documents(config)
    template = ChatTemplate(tokenizer) if config.kind == "chat" else None
    # the name is that of all that decides the tokens: the files as they are now, and the tokenizer
    name = (template or tokenizer).name
    around = " ".join(map(str, (tokenizer.end_id, *tokenizer.front, *tokenizer.back)))
    digest = hashlib.blake2b(f"{FORMAT}\n{name}\n{around}\n".encode(), digest_size=16)
    for source in sources:
        digest.update(os.fsencode(os.path.realpath(source.path)))
        digest.update(f"\n{source.size}\n{source.mtime_ns}\n{source.field}\n{source.entry}\n".encode())
    root = Path(os.path.expanduser(config.cache_dir)) if config.cache_dir else user_cache.cache_root()
    if root is None:
        raise UserError("DataConfig.cache_dir ('') needs a home folder and this user has none; name a folder there")
    folder = root / f"tokens-{digest.hexdigest()}"
    try:
        meta = _read_meta(folder) or _build(folder, sources, tokenizer, template)
    except OSError as error:
        raise UserError(
            f"the token cache in {str(root)!r} cannot be written or read ({error.strerror or error}); make room "
            "there or set DataConfig.cache_dir to another folder"
        ) from error
    check_vocabulary(config, tokenizer, vocab_size, meta.max_id + 1)
    return TokenCache(folder, meta, config.held_out_fraction)


def check_vocabulary(config: DataConfig, tokenizer: Tokenizer, vocab_size: int | None, needed: int) -> None:
    """Raise a UserError where a model's vocabulary, if it is known, is smaller than batches need."""
    if vocab_size is not None and needed > vocab_size:
        raise UserError(
            f"batches can hold token {needed - 1} (DataConfig.tokenizer {config.tokenizer!r}, {tokenizer.vocab_size} "
            f"ids), outside the model's vocabulary; ModelConfig.vocab_size ({vocab_size}) must be at least {needed}"
        )


def _read_meta(folder: Path) -> CacheMeta | None:
    """Read meta.json; None where there is no cache, or where its files are not of the size that was written."""
    if not folder.is_dir():
        return None
    try:
        meta = CacheMeta(**json.loads((folder / "meta.json").read_text()))
        sizes = [(folder / name).stat().st_size for name in ("tokens.bin", "documents.bin")]
        whole = sizes == [meta.tokens * np.dtype(meta.dtype).itemsize, meta.documents * 8]
    except (FileNotFoundError, ValueError, TypeError):
        whole = False
    if not whole:
        logging.warning("the token cache %s is damaged; it is built again", folder.name)
        return None
    return meta


def _build(folder: Path, sources: list[Source], tokenizer: Tokenizer, template: ChatTemplate | None) -> CacheMeta:
    """Write a cache next to its place, then rename it there; keep the one that another builder put there first."""
    root = folder.parent
    root.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(folder.name + ".lock"), "a") as lock:
        # One process builds while the others wait, where the file system has locks. This only saves work: without
        # locks several build, and the rename decides.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        if (meta := _read_meta(folder)) is not None:
            return meta
        # what killed builders left goes, once none of them can still be running
        for left in root.glob(".building-*"):
            with contextlib.suppress(OSError):
                newest = max(path.stat().st_mtime for path in (left, *left.iterdir()))
                if time.time() - newest > ABANDONED_SECONDS:
                    shutil.rmtree(left)
        building = root / f".building-{uuid.uuid4().hex}"
        building.mkdir()
        try:
            meta = _write(building, sources, tokenizer, template)
            if folder.exists() and _read_meta(folder) is None:
                shutil.rmtree(folder)
            try:
                os.replace(building, folder)
            except OSError:
                theirs = _read_meta(folder)  # a folder that is not empty cannot be replaced
                if theirs is None:
                    raise
                return theirs
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return meta


def _pieces(sources: list[Source], tokenizer: Tokenizer, template: ChatTemplate | None):
    """Yield lists of (ids [tokens] int32 of a piece of a document, whether it ends it, share of its source, source)."""
    if template is None:
        pieces = ((*piece, source) for source in sources for piece in source.pieces())
    else:
        records = ((*record, source) for source in sources for record in source.records(("messages", "tools")))
        pieces = ((template.read(record, where), True, share, source) for where, record, share, source in records)
    front, behind, begins = tokenizer.front, [*tokenizer.back, tokenizer.end_id], True
    while True:
        batch, characters = [], 0
        for piece in pieces:  # from where the last batch ended
            batch.append(piece)
            content, *_ = piece
            characters += len(content if template is None else content[0])
            if characters >= BATCH_CHARACTERS:
                break
        if not batch:
            return
        encoded = (template or tokenizer).encode_batch([content for content, *_ in batch])
        whole = []
        for ids, (_, ends_document, *place) in zip(encoded, batch, strict=True):
            if template is None:
                parts = [front] * begins + [ids] + [behind] * ends_document
                ids = np.concatenate(parts, dtype=np.int32, casting="unsafe")
            begins = ends_document
            whole.append((ids, ends_document, *place))
        yield whole


def _write(building: Path, sources: list[Source], tokenizer: Tokenizer, template: ChatTemplate | None) -> CacheMeta:
    """Write the files of a cache into a folder, and say how far it is where that takes long."""
    wide = template is not None or tokenizer.vocab_size > 1 << 16
    dtype, content = np.dtype("<u4" if wide else "<u2"), hashlib.blake2b(digest_size=16)
    tokens = documents = answers = 0
    max_id = tokenizer.end_id
    entries = [0] * (1 + max(source.entry for source in sources))
    ends_of_sources = np.cumsum([source.size for source in sources]).tolist()
    before = {source.path: end - source.size for source, end in zip(sources, ends_of_sources, strict=True)}  # bytes
    told = time.monotonic()
    with open(building / "tokens.bin", "wb") as token_file, open(building / "documents.bin", "wb") as end_file:
        for batch in _pieces(sources, tokenizer, template):
            ends = []
            for ids, ends_document, _, source in batch:
                tokens += ids.size
                entries[source.entry] = tokens
                if ends_document:
                    ends.append(tokens)
            ids = np.concatenate([ids for ids, *_ in batch])
            max_id = max(max_id, int((ids & ID_BITS).max()))
            answers += int(np.count_nonzero(ids & ANSWER))  # of text no id has such a bit
            token_file.write(ids.astype(dtype).tobytes())
            end_file.write(np.array(ends, "<i8").tobytes())
            content.update(ids.astype("<u4").tobytes())
            documents += len(ends)
            if time.monotonic() - told > TOLD_EVERY:
                *_, share, source = batch[-1]
                part = min(1.0, (before[source.path] + share * source.size) / max(1, ends_of_sources[-1]))
                print(f"{part:4.0%} of the text: {documents:,} documents, {tokens:,} tokens", file=sys.stderr)
                told = time.monotonic()
        if not documents:
            named = sources[0].path if len(sources) == 1 else f"each of {len(sources)} files"
            raise UserError(f"DataConfig.path names no text: {named} holds none; name one that does")
        for file in (token_file, end_file):
            file.flush()
            os.fsync(file.fileno())
    with open(building / "documents.bin", "rb") as file:
        while block := file.read(1 << 22):
            content.update(block)
    meta = CacheMeta(
        tokenizer=tokenizer.name,
        dtype=dtype.str,
        tokens=tokens,
        documents=documents,
        max_id=max_id,
        entries=np.maximum.accumulate(entries).tolist(),
        content=content.hexdigest(),
        answers=answers,
    )
    with open(building / "meta.json", "w") as file:
        json.dump(asdict(meta), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    return meta

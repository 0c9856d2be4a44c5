"""A corpus as one memory-mapped array of token ids, built by the first process, whole or not at all.

Inputs: a DataConfig and a tokenizer. Outputs: a TokenCache. A cache is a folder `tokens-<fingerprint>` with tokens.bin
(ids, each document closed by end_id), documents.bin (where each document ends) and meta.json. It is written in a folder
of another name, synced, and renamed: the rename is what makes it a cache, so a killed builder leaves nothing that could
be taken for one, and of several builders (on several hosts, too) the first to rename wins. Windows and batches are made
elsewhere.
"""

import contextlib
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from absl import logging

from moe_jax.data.config import DataConfig, cache_root
from moe_jax.data.corpus import Source, find_documents
from moe_jax.data.held_out_split import TokenSpan, split_documents
from moe_jax.data.tokenizer import Tokenizer, build_tokenizer
from moe_jax.errors import UserError

FORMAT = 1
BATCH_CHARACTERS = 4 << 20  # text handed to the tokenizer at once
LOCK_SECONDS = 600.0  # the longest wait for another builder; after it both build, which is correct but repeats work
ABANDONED_SECONDS = 86400.0  # a builder's folder untouched for so long has no builder


@dataclass(frozen=True, kw_only=True)
class CacheMeta:
    """Say what a cache holds; the text of meta.json.

    Args:
      format: of the folder; another number is another fingerprint.
      tokenizer: its name.
      dtype: of tokens.bin, '<u2' or '<u4'.
      tokens: ids in tokens.bin, ends of documents included.
      documents: documents with any text.
      source_files: files they came from.
      source_bytes: bytes of those files, as they lie on the disk.
      max_id: the largest id in tokens.bin.
      content: a hash of the ids and the ends of the documents, equal on any two machines with the same text.
    """

    format: int
    tokenizer: str
    dtype: str
    tokens: int
    documents: int
    source_files: int
    source_bytes: int
    max_id: int
    content: str


class TokenCache:
    """Hold the ids of a corpus, memory-mapped, and which of them are held out.

    Attributes:
      meta: what it holds.
      tokens: ids, uint16 or uint32 [meta.tokens], on the disk.
      ends: int64 [meta.documents], one past the last token of each document, on the disk.
      train, held_out: the two parts, each to be read as one array.
    """

    def __init__(self, folder: Path, meta: CacheMeta, held_out_fraction: float):
        self.meta = meta
        self.tokens = np.memmap(folder / "tokens.bin", np.dtype(meta.dtype), "r")
        self.ends = np.memmap(folder / "documents.bin", np.dtype("<i8"), "r")
        train, held_out = split_documents(self.ends, held_out_fraction)
        self.train = TokenSpan(self.tokens, train)
        self.held_out = TokenSpan(self.tokens, held_out)


def build_cache(config: DataConfig, tokenizer: Tokenizer | None = None, *, vocab_size: int | None = None) -> TokenCache:
    """Open the token cache of a corpus; build it first where it is missing or damaged.

    Any number of processes may call this at once.

    Args:
      config: names the text, the held-out share and the folder for caches.
      tokenizer: what config.tokenizer names; None builds it.
      vocab_size: the model's; None leaves it unchecked.

    Raises:
      UserError: missing, empty or unreadable text, a folder that cannot be written, or a token outside the vocabulary.
    """
    tokenizer = tokenizer or build_tokenizer(config)
    sources = find_documents(config)
    root = cache_root(config)
    folder = root / f"tokens-{_fingerprint(sources, tokenizer)}"
    try:
        meta = _read_meta(folder)
        if meta is None:
            root.mkdir(parents=True, exist_ok=True)
            with _one_builder_at_a_time(folder):
                meta = _read_meta(folder) or _build(folder, sources, tokenizer)
    except OSError as error:
        raise UserError(
            f"the token cache in {str(root)!r} cannot be written or read ({error.strerror or error}); make room "
            "there or set DataConfig.cache_dir to another folder"
        ) from error
    if vocab_size is not None and meta.max_id >= vocab_size:
        raise UserError(
            f"the corpus holds token {meta.max_id} (DataConfig.tokenizer {config.tokenizer!r}, {tokenizer.vocab_size} "
            f"ids), which is outside the model's vocabulary; ModelConfig.vocab_size ({vocab_size}) must be at least "
            f"{meta.max_id + 1}"
        )
    return TokenCache(folder, meta, config.held_out_fraction)


def _fingerprint(sources: list[Source], tokenizer: Tokenizer) -> str:
    """Name a cache after all that decides its tokens: the files as they are now, and the tokenizer."""
    digest = hashlib.blake2b(f"{FORMAT}\n{tokenizer.name}\n{tokenizer.end_id}\n".encode(), digest_size=16)
    for source in sources:
        digest.update(os.fsencode(os.path.realpath(source.path)))
        digest.update(f"\n{source.size}\n{source.mtime_ns}\n{source.field}\n".encode())
    return digest.hexdigest()


def _read_meta(folder: Path) -> CacheMeta | None:
    """Read meta.json; None where there is no cache, or where its files are not as long as it says."""
    if not folder.is_dir():
        return None
    try:
        meta = CacheMeta(**json.loads((folder / "meta.json").read_text()))
        sizes = [(folder / name).stat().st_size for name in ("tokens.bin", "documents.bin")]
        whole = sizes == [meta.tokens * np.dtype(meta.dtype).itemsize, meta.documents * 8] and meta.format == FORMAT
    except (FileNotFoundError, ValueError, TypeError):
        whole = False
    if not whole:
        logging.warning("the token cache %s is damaged; it is built again", folder.name)
        return None
    return meta


def _build(folder: Path, sources: list[Source], tokenizer: Tokenizer) -> CacheMeta:
    """Write a cache beside its place, then rename it there; keep the one that another builder put there first."""
    started = time.monotonic()
    _remove_abandoned(folder.parent)
    building = folder.parent / f".building-{uuid.uuid4().hex}"
    building.mkdir()
    try:
        meta = _write(building, sources, tokenizer)
        if folder.exists() and _read_meta(folder) is None:
            os.replace(folder, building.with_name(building.name + "-damaged"))
            shutil.rmtree(building.with_name(building.name + "-damaged"), ignore_errors=True)
        try:
            os.replace(building, folder)
        except OSError:
            theirs = _read_meta(folder)  # a folder that is not empty cannot be replaced
            if theirs is None:
                raise
            return theirs
        _sync(folder.parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    logging.info(
        "token cache: %d files, %d bytes, %d documents, %d tokens in %.1f s",
        *(meta.source_files, meta.source_bytes, meta.documents, meta.tokens, time.monotonic() - started),
    )
    return meta


def _write(building: Path, sources: list[Source], tokenizer: Tokenizer) -> CacheMeta:
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    content = hashlib.blake2b(digest_size=16)
    tokens = documents = 0
    max_id = tokenizer.end_id
    with open(building / "tokens.bin", "wb") as token_file, open(building / "documents.bin", "wb") as end_file:
        for ids, closed in _encoded(sources, tokenizer):
            max_id = max(max_id, int(ids.max()))
            ends = (tokens + closed).astype("<i8")
            for file, chunk in ((token_file, ids.astype(dtype).tobytes()), (end_file, ends.tobytes())):
                file.write(chunk)
            content.update(ids.astype("<u4").tobytes())
            tokens += ids.size
            documents += ends.size
            logging.log_every_n_seconds(logging.INFO, "token cache: %d documents so far", 10, documents)
        if not documents:
            raise UserError(f"DataConfig.path names {len(sources)} files and none holds any text; name one that does")
        for file in (token_file, end_file):
            file.flush()
            os.fsync(file.fileno())
    content.update(np.fromfile(building / "documents.bin", "<i8").tobytes())
    meta = CacheMeta(
        format=FORMAT,
        tokenizer=tokenizer.name,
        dtype=dtype.str,
        tokens=tokens,
        documents=documents,
        source_files=len(sources),
        source_bytes=sum(source.size for source in sources),
        max_id=max_id,
        content=content.hexdigest(),
    )
    with open(building / "meta.json", "w") as file:
        json.dump(asdict(meta), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync(building)
    return meta


def _encoded(sources: list[Source], tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield ids int32 [n] and, inside them, one past the end of each document that closes, int64 [d]."""
    end = np.array([tokenizer.end_id], np.int32)

    def encode(pieces):
        parts, ends, size = [], [], 0
        for ids, (_, ends_document) in zip(tokenizer.encode_batch([text for text, _ in pieces]), pieces, strict=True):
            parts += [ids, end] if ends_document else [ids]
            size += ids.size + ends_document
            if ends_document:
                ends.append(size)
        return np.concatenate(parts), np.array(ends, np.int64)

    pieces, characters = [], 0
    for source in sources:
        for piece in source.pieces():
            pieces.append(piece)
            characters += len(piece.text)
            if characters >= BATCH_CHARACTERS:
                yield encode(pieces)
                pieces, characters = [], 0
    if pieces:
        yield encode(pieces)


@contextlib.contextmanager
def _one_builder_at_a_time(folder: Path):
    """Let one process build while the others wait, where the file system has locks.

    This only saves work: without locks, or when the wait takes too long, several build and the rename decides.
    """
    import fcntl

    with open(folder.with_name(folder.name + ".lock"), "a") as lock:
        deadline = time.monotonic() + LOCK_SECONDS
        while time.monotonic() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if folder.is_dir():
                    break
                time.sleep(0.05)
            except OSError:
                break
        else:
            logging.warning("another process has built the token cache for %.0f s; building it here too", LOCK_SECONDS)
        yield


def _remove_abandoned(root: Path):
    """Remove what killed builders left, once no builder can still be running."""
    for left in root.glob(".building-*"):
        with contextlib.suppress(OSError):
            newest = max(path.stat().st_mtime for path in (left, *left.iterdir()))
            if time.time() - newest > ABANDONED_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


def _sync(folder: Path):
    """Sync a folder's entries to the disk; some network file systems refuse, which is harmless."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)

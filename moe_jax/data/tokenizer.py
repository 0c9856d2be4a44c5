"""Between text and token ids: the byte tokenizer, and any Hugging Face tokenizer.json.

Inputs: text. Outputs: 1-d int32 ids below `vocab_size`. `encode_batch` adds nothing: the cache puts `front` before each
document, `back` and `end_id` behind it, and only masked-language-model inputs ever hold `mask_id`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from moe_jax.data.corpus import DataConfig
from moe_jax.errors import UserError

_LARGEST_JSON = 64 << 20  # an index names each tensor of a model


def check_inside(folder: str | os.PathLike[str], name: str) -> Path:
    """Return the path of a file in a folder that somebody else may have filled; it need not exist.

    Raises:
      UserError: it, or what it is a link to, lies elsewhere, or is no regular file (a pipe would be waited for). Links
        of the Hugging Face hub's cache are followed: from snapshots/REVISION to its own blobs.
    """
    path, root = Path(folder) / name, Path(folder).resolve()
    try:
        real = path.resolve()
        usable = real.is_file() or not real.exists()
    except (OSError, ValueError, RuntimeError) as error:  # NUL, a name that is too long, links in a circle
        raise UserError(f"{folder}: {name!r} is no name of a file ({error}); copy the folder again") from error
    blobs = [(root.parents[1] / "blobs").resolve()] if root.parent.name == "snapshots" else []
    if not any(real.is_relative_to(home) for home in (root, *blobs)):
        raise UserError(f"{path} leads out of its folder, to {real}, which is not read; copy the file itself there")
    if not usable:
        raise UserError(f"{path} is no regular file; copy the folder again")
    return path


def read_json(folder: str | os.PathLike[str], name: str) -> dict:
    """Return the object of a JSON file in such a folder, {} where the file is not there."""
    path = check_inside(folder, name)
    try:
        if path.exists() and path.stat().st_size > _LARGEST_JSON:
            raise ValueError(f"it has more than {_LARGEST_JSON} bytes")
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path} ({error}); put back the file that the folder came with") from error
    return content


FILE = "tokenizer.json"  # by this name in a run folder, and in those of transformers
END_FILES = ("generation_config.json", "config.json")  # the first that names an id decides


# what goes with a tokenizer from folder to folder
CARRIED = (FILE, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", *END_FILES)
MOST_IDS = 1 << 24  # a larger id is a damaged file's, and a table of so many rows none that anybody trains


def carry_files(source: Path, target: Path, *, add_special_tokens: bool = True) -> None:
    """Copy the files of a tokenizer, of generation, and config.json, where they are there.

    Without `add_special_tokens` transformers puts none around a text by them.
    """
    for name in CARRIED:
        if check_inside(source, name).exists():
            shutil.copyfile(source / name, target / name)
    if (target / FILE).exists() and not add_special_tokens:
        without = {
            FILE: {"post_processor": None},
            "tokenizer_config.json": {"add_bos_token": False, "add_eos_token": False},
        }
        for name, changed in without.items():
            text = json.dumps(read_json(target, name) | changed, ensure_ascii=False)
            (target / name).write_text(text, encoding="utf-8")


def read_end_ids(folder: str | os.PathLike[str]) -> tuple[int, ...]:
    """Return `eos_token_id` of generation_config.json, else of config.json; () where neither file names one."""
    for name in END_FILES:
        given = read_json(folder, name).get("eos_token_id")
        ids = given if isinstance(given, list) else [] if given is None else [given]
        if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < MOST_IDS for i in ids):
            path = Path(folder) / name
            raise UserError(f"{path}: eos_token_id ({given!r:.80}) must be an id below {MOST_IDS}, or some; correct it")
        if ids:
            return tuple(ids)
    return ()


END_NAMES = (
    "<|endoftext|>", "<|end_of_text|>", "<|end|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>", "[SEP]",
)  # fmt: skip
MASK_NAMES = ("<|mask|>", "[MASK]", "<mask>", "<|mdm_mask|>")


# What every tokenizer has:
#   name: identifies the mapping; two tokenizers with the same name give the same ids.
#   vocab_size: every id is below it, end and mask included.
#   least_size: every id is below it that a text without special tokens can hold, `front`, `back` and end included.
#   front, back: ids before each document and prompt, and behind each document before its end.
#   end_id: closes a document; end_ids: all that end a generated text, end_id first.
#   mask_id: stands for a hidden token; never in the corpus.
#   encode_batch: the ids of each text, int32 [tokens].
#   encode_prompt: those of one text that is to be continued, `front` included.
#   byte_counts: how many bytes of text each id stands for, int64 [vocab_size], 0 of special ones; None where not known.
#   decode: the text of ids; end and mask show as `<|end|>` and `<|mask|>` or by their name in the file.
class ByteTokenizer:
    """Give each byte of the UTF-8 text its own id: no file, no training, no unknown token, on any machine.

    258 ids: 0-255 are the bytes, 256 ends a document, 257 is the mask. End and mask have ids of their own, because
    every byte up to 0x7F may stand in a text.
    """

    name = "byte"
    vocab_size = 258
    least_size = 257
    front = back = ()
    end_id = 256
    end_ids = (256,)
    mask_id = 257

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode_prompt(text) for text in texts]

    def encode_prompt(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def byte_counts(self) -> np.ndarray | None:
        return (np.arange(self.vocab_size) < 256).astype(np.int64)

    def decode(self, ids: np.ndarray) -> str:
        marks = {self.end_id: b"<|end|>", self.mask_id: b"<|mask|>"}
        parts = (bytes([i]) if i < 256 else marks.get(i, b"\xff") for i in np.asarray(ids).tolist())
        return b"".join(parts).decode(errors="replace")


class HuggingFaceTokenizer:
    """Read a tokenizer.json with the `tokenizers` package.

    The end is that of the checkpoint that the file lies in: the first `eos_token_id` of generation_config.json, else of
    config.json, next to it. Without these, ends are found by their usual names (END_NAMES), and so are masks
    (MASK_NAMES); one that the file lacks gets the next free id, so `vocab_size` can be one or two above the file's.
    Truncation and padding that the file asks for are switched off: they would cut documents silently. `front`
    and `back` are what its post-processor puts around a text but for the end, nothing without `add_special_tokens`.
    """

    def __init__(self, path: str, add_special_tokens: bool = True):
        try:
            import tokenizers
        except ImportError as error:
            raise UserError(
                f"DataConfig.tokenizer ({path!r}) needs the package 'tokenizers', which is not installed; "
                "pip install tokenizers, or set DataConfig.tokenizer = 'byte'"
            ) from error
        file = Path(path).expanduser()
        try:
            if file.exists() and not file.is_file():  # a pipe would be waited for
                raise OSError(errno.EINVAL, "it is no file")
            text = file.read_bytes()
        except OSError as error:
            raise UserError(
                f"DataConfig.tokenizer ({path!r}) must be 'byte' or the path of a tokenizer.json ({error.strerror}); "
                "scripts/train_tokenizer.py learns one from text"
            ) from error
        self.file, self.text = file, text
        with self._failures_named("is not a tokenizer.json"):
            self._tokenizer = tokenizers.Tokenizer.from_buffer(text)
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            ids = self._tokenizer.get_vocab(with_added_tokens=True)
            # of a text that it knows: some have no token for others
            around = self._tokenizer.encode(min(ids, key=ids.get, default=""), add_special_tokens=add_special_tokens)
        size = max([*ids.values(), *around.ids], default=-1) + 1  # not the count: ids may have holes
        if size > MOST_IDS:
            raise UserError(f"DataConfig.tokenizer ({path!r}): the id {size - 1} is not below {MOST_IDS}; name another")
        named = next((ids[name] for name in END_NAMES if name in ids), size)
        self.end_ids = read_end_ids(file.parent) or (named,)
        self.end_id, known = self.end_ids[0], set(ids.values())
        self._marks = {end: "<|end|>" for end in self.end_ids if end not in known}
        size = max(size, *(end + 1 for end in self.end_ids))
        self.mask_id = next((ids[name] for name in MASK_NAMES if name in ids), size)
        if self.mask_id == size:
            self._marks[size] = "<|mask|>"
            size += 1
        self.vocab_size = size
        mask = around.special_tokens_mask
        before, behind = ([*mask[::way], 0].index(0) for way in (1, -1))
        self.front = tuple(around.ids[:before])
        self.back = tuple(i for i in around.ids[max(before, len(mask) - behind) :] if i != self.end_id)
        marked = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = tuple(i for i, token in marked.items() if token.special)
        self.special = tuple(marked[i].content for i in self.special_ids)  # their text
        ordinary = set(self._tokenizer.get_vocab(with_added_tokens=False).values()) - set(marked)
        self.least_size = max([*ordinary, *self.front, *self.back, self.end_id]) + 1
        self.name = "tokenizer.json " + hashlib.blake2b(text, digest_size=16).hexdigest()

    @contextlib.contextmanager
    def _failures_named(self, what: str) -> Iterator[None]:
        """Turn whatever the package raises, and panics of its regular expressions, into one line."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise UserError(f"DataConfig.tokenizer ({str(self.file)!r}) {what} ({error}); name another") from error

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        with self._failures_named("fails on a text"):
            encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(item.ids, np.int32) for item in encoded]

    def encode_with_places(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the ids of each text, int32 [tokens], and the characters of it that each stands for, [tokens, 2]."""
        with self._failures_named("fails on a text"):
            encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [(np.array(e.ids, np.int32), np.array(e.offsets, np.int64).reshape(-1, 2)) for e in encoded]

    def encode_prompt(self, text: str) -> np.ndarray:
        return np.append(np.array(self.front, np.int32), self.encode_batch([text])[0])

    def byte_counts(self) -> np.ndarray | None:
        if (json.loads(self.text).get("decoder") or {}).get("type") != "ByteLevel":  # its tokens have a letter a byte
            return None
        counts, added = np.zeros(self.vocab_size, np.int64), self._tokenizer.get_added_tokens_decoder()
        for token, i in self._tokenizer.get_vocab(with_added_tokens=True).items():
            counts[i] = 0 if i in self.special_ids else len(token.encode() if i in added else token)
        return counts

    def decode(self, ids: np.ndarray) -> str:
        runs = [(mark, [*run]) for mark, run in itertools.groupby(np.asarray(ids).tolist(), self._marks.get)]
        decode = self._tokenizer.decode
        with self._failures_named("fails on ids"):
            return "".join(mark * len(run) if mark else decode(run, skip_special_tokens=False) for mark, run in runs)


Tokenizer = ByteTokenizer | HuggingFaceTokenizer


def build_tokenizer(config: DataConfig) -> Tokenizer:
    """Build the tokenizer that config.tokenizer names; a UserError where it is neither 'byte' nor a tokenizer.json."""
    from_file = config.tokenizer != "byte"
    return HuggingFaceTokenizer(config.tokenizer, config.add_special_tokens) if from_file else ByteTokenizer()


def with_kept_file(config: DataConfig, folder: Path) -> DataConfig:
    """Return the config, with the copy that a run folder keeps where the tokenizer's own file is gone."""
    named, kept = Path(config.tokenizer).expanduser(), folder / FILE
    if config.tokenizer == "byte" or named.exists() or not kept.exists():
        return config
    return dataclasses.replace(config, tokenizer=str(kept))


def find_tokenizer(config: DataConfig, folder: Path, trained_with: str | None) -> Tokenizer | None:
    """Return the tokenizer of a run: the file in its folder, else what config.tokenizer names; None where none is left.

    Args:
      folder: the run folder.
      trained_with: name of the tokenizer that a checkpoint was trained with, None where it does not say.

    Raises:
      UserError: the tokenizer that is there now is another one.
    """
    if config.tokenizer == "byte":
        return ByteTokenizer()
    paths = (folder / FILE, Path(config.tokenizer).expanduser())
    path = next((path for path in paths if path.exists()), None)
    tokenizer = None if path is None else build_tokenizer(dataclasses.replace(config, tokenizer=str(path)))
    if tokenizer is not None and trained_with not in (None, tokenizer.name):
        raise UserError(
            f"{path} is not the tokenizer that {folder} was trained with ({tokenizer.name.split()[-1]}, not "
            f"{trained_with.split()[-1]}); put that one back at {paths[0]}"
        )
    return tokenizer

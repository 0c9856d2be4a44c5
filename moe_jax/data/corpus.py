"""From DataConfig.path to documents: which files there are, in the order of their names, and the text in them.

Files are text, records of JSON, or tables of Parquet and Arrow as downloaded or by `save_to_disk`, read a few rows at a
time. pyarrow (extra [data]) is imported when the first table is read.
"""

import codecs
import contextlib
import glob
import gzip
import json
import os
import re
import stat
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from absl import logging

from moe_jax.errors import UserError

BLOCK_BYTES = 4 << 20  # a text file is read in blocks, so that one file of many gigabytes needs no such memory
RECORD_BYTES = 64 << 20  # of a line of JSON at most: it is read whole, and that of a small .gz can fill a memory

# In the standard library's tree: not its text (other people's packages, tests), or different on each machine.
_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_MACHINE_MADE = ("_sysconfigdata", "sitecustomize", "usercustomize")

TABLES, JSON, COLUMNS = (".parquet", ".arrow"), (".jsonl", ".ndjson", ".json"), (".csv", ".tsv")
_ROWS = 512  # that are in memory at once
# words between no letters, as the library `datasets` knows splits, and files that it writes next to the data
_SPLITS = re.compile(
    r"(?<![^\W\d_])(?:(train(?:ing)?)|validation|valid|val|dev|test(?:ing)?|eval(?:uation)?)(?![^\W\d_])", re.IGNORECASE
)
_NO_DATA = re.compile(r"cache-.*\.arrow|dataset_infos?\.json|dataset_dict\.json|state\.json")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Name the text and how it is cut into training windows.

    The order of the windows is no part of this: it follows from `train.seed` alone.

    Args:
      kind: 'text', or 'chat': conversations under `messages` (and `tools`) of records, written by the tokenizer's chat
        template, of which only the assistant's tokens are targets. Each is whole in one window, or cut at its end; with
        `ModelConfig.document_mask` a window holds as many as fit, else one.
      path: a file, a folder, a glob, or several separated by commas; '' is Python's own sources, found at run time. In
        a folder, read recursively, records alone count where it has any, and where names tell splits that of training.
      field: the key of the text in records, which are lines of .jsonl and .ndjson, the list or the one record of .json
        (all also as .gz), and rows of .parquet and .arrow files.
      weights: of a mixture: of all windows of a run the share that comes from each entry of `path`, over their sum; ()
        takes all text in equal parts.
      sequence_length: targets in a window; a window holds one token more.
      tokenizer: 'byte', or the path of a Hugging Face tokenizer.json.
      add_special_tokens: put what the tokenizer's post-processor puts around a text, such as a BOS, around documents
        and before prompts; conversations have what their template writes.
      held_out_fraction: the share of the tokens that training never sees, above 0 and below 0.5.
      cache_dir: folder of the token caches; '' means $XDG_CACHE_HOME/moe_jax, or ~/.cache/moe_jax.
    """

    kind: str = "text"
    path: str = ""
    field: str = "text"
    weights: tuple[float, ...] = ()
    sequence_length: int = 128
    tokenizer: str = "byte"
    add_special_tokens: bool = True
    held_out_fraction: float = 0.02
    cache_dir: str = ""

    def __post_init__(self):
        for name in ("field", "tokenizer"):
            if not getattr(self, name):
                raise UserError(f"DataConfig.{name} ('') must not be empty; leave it out to get its default")
        if self.kind not in ("text", "chat"):
            raise UserError(f"DataConfig.kind ({self.kind!r}) must be 'text' or 'chat'")
        entries = len(self.path.split(","))
        if self.weights and (len(self.weights) != entries or min(self.weights) < 0 or sum(self.weights) <= 0):
            raise UserError(
                f"DataConfig.weights ({self.weights}) must be a number of at least 0 for each of the {entries} entries "
                "of DataConfig.path, which commas separate, and not all 0"
            )
        if self.sequence_length < 1:
            raise UserError(f"DataConfig.sequence_length ({self.sequence_length}) must be at least 1; set it so")
        if not 0 < self.held_out_fraction < 0.5:
            raise UserError(
                f"DataConfig.held_out_fraction ({self.held_out_fraction}) must be above 0 and below 0.5, because every "
                "run reports a held-out loss; set it to, say, 0.02"
            )


@dataclass(frozen=True, kw_only=True)
class Source:
    """Name one file and what it was when it was found."""

    path: str  # as the user wrote it, so that messages repeat it
    size: int  # bytes
    mtime_ns: int  # time of the last change
    field: str  # the key of the text in each record; '' for a file that is one text
    entry: int = 0  # which entry of DataConfig.path named it

    def pieces(self) -> Iterator[tuple[str, bool, float]]:
        """Yield (text, whether it ends its document, share of the file read so far); empty documents are left out.

        Documents longer than a block come in several pieces.

        Raises:
          UserError: naming the file, and the line where there is one.
        """
        if not self.field:
            with self._opened() as (file, read_share):
                for text, ends_document in _text_pieces(file, self.path):
                    yield text, ends_document, read_share()
            return
        is_table = suffix_of(self.path) in TABLES
        for where, record, share in self.records((self.field,)):
            if is_table and self.field not in record:  # a null
                continue
            if self.field not in record:
                raise UserError(
                    f"{where}: has no field {self.field!r} (it has {sorted(record)}); set DataConfig.field, "
                    "or DataConfig.kind = 'chat' for conversations"
                )
            text = record[self.field]
            if not isinstance(text, str):
                kind = type(text).__name__
                raise UserError(f"{where}: field {self.field!r} holds a {kind}, not text; set DataConfig.field")
            if re.search("[\ud800-\udfff]", text):  # which JSON can hold
                raise UserError(f"{where}: field {self.field!r} holds half a surrogate pair; remove it")
            if text:
                yield text, True, share

    def records(self, keys: Sequence[str] = ()) -> Iterator[tuple[str, dict, float]]:
        """Yield (where it stands, record, share of the file read so far) of each record of JSON or row of a table.

        Of a table only the columns `keys` are read.

        Raises:
          UserError: as `pieces`; a table without the first of the keys, or a file that is neither.
        """
        if suffix_of(self.path) in TABLES:
            for number, (row, share) in enumerate(table_rows(self.path, keys), start=1):
                yield f"{self.path}: row {number}", _without_nulls(row), share
        elif self.field:
            with self._opened() as (file, read_share):
                for where, record in _json_records(file, self.path):
                    yield where, record, read_share()
        else:
            raise UserError(f"{self.path}: conversations stand in {', '.join((*JSON, *TABLES))} files; name some")

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[BinaryIO, Callable[[], float]]]:
        try:
            with open(self.path, "rb") as raw:
                file = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if self.path.lower().endswith(".gz") else raw
                yield file, lambda: raw.tell() / max(1, self.size)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UserError(f"{self.path}: not a whole gzip file ({error}); compress it again") from error
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read ({error.strerror}); check DataConfig.path") from error


def suffix_of(path: str) -> str:
    """Return the suffix that says how a file is read, in small letters and without '.gz'."""
    return os.path.splitext(path.lower().removesuffix(".gz"))[1]


def _without_nulls(value: Any) -> Any:
    """Return a row without the nulls that Arrow gives to fields which only other rows have."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def training_files(files: list[str], folder: str) -> list[str]:
    """Return the files of a folder that hold text to train on: all, where none holds records; tell of those left out.

    Where some hold records, other files describe them; those called after the training split count, else those called
    after no split, else all. A file's name wins over that of its folder.
    """
    ranks = {}
    for name in files:
        if suffix_of(name) in (*TABLES, *JSON, *COLUMNS) and not _NO_DATA.fullmatch(os.path.basename(name)):
            splits = _SPLITS.findall(os.path.relpath(name, folder))  # '' for each but the training split
            ranks[name] = 1 if not splits else 0 if splits[-1] else 2
    first = min(ranks.values(), default=0)
    kept = [name for name, rank in ranks.items() if rank == first] or files
    if len(kept) < len(files):
        told = "%s: left out: %d of %d files, without records or of other splits; name files to take others"
        logging.warning(told, folder, len(files) - len(kept), len(files))
    return kept


def find_documents(config: DataConfig) -> list[Source]:
    """List the files that config.path names, each once, in an order that depends on their names only.

    Folders are read recursively without hidden entries; their files are sorted by relative name. Entries of a comma
    list keep the order in which the user wrote them.

    Raises:
      UserError: when an entry names nothing, or what cannot be read.
    """
    path, names = config.path, []
    if not path and config.kind == "chat":
        raise UserError(
            "DataConfig.kind ('chat') has no data of its own; name .jsonl or .parquet files in DataConfig.path"
        )
    if not path:
        for name in _files_below(sysconfig.get_path("stdlib"), skip=_NOT_THE_LIBRARY):
            if name.endswith(".py") and not os.path.basename(name).startswith(_MACHINE_MADE):
                names.append((0, name))
        if not names:
            raise UserError(
                "DataConfig.path ('') means Python's own sources, and this Python came without them; name a text file, "
                "a folder or a .jsonl file there"
            )
    else:
        whole = os.path.expanduser(path)
        one = os.path.exists(whole) and not config.weights
        entries = [whole] if one else [os.path.expanduser(part.strip()) for part in path.split(",")]
        if not any(entries):
            raise UserError(f"DataConfig.path ({path!r}) names nothing; give a file, a folder or a glob")
        for number, entry in enumerate(entries):
            if not entry:
                continue
            matches = [entry] if os.path.exists(entry) else sorted(glob.glob(entry, recursive=True))
            if not matches:
                raise UserError(
                    f"DataConfig.path ({path!r}): {entry!r} is no file, no folder and matches nothing here; correct "
                    "it, or leave it out to train on Python's own sources"
                )
            below = (training_files(_files_below(name), name) if os.path.isdir(name) else [name] for name in matches)
            if not (files := [file for files in below for file in files]):
                raise UserError(f"DataConfig.path ({path!r}): {entry!r} holds no files; put text files or .jsonl there")
            names += [(number, file) for file in files]
    sources: dict[str, Source] = {}
    for number, name in names:
        try:
            status = os.stat(name)
        except OSError as error:
            raise UserError(f"{name}: cannot be read ({error.strerror}); check DataConfig.path") from error
        if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for
            raise UserError(f"{name}: is no regular file; write what it gives to a file, and name that")
        if suffix_of(name) in COLUMNS:
            raise UserError(f"{name}: is not read; write its rows as lines of JSON, a .jsonl file, and name that")
        field = config.field if suffix_of(name) in (*JSON, *TABLES) else ""
        source = Source(path=name, size=status.st_size, mtime_ns=status.st_mtime_ns, field=field, entry=number)
        sources.setdefault(os.path.realpath(name), source)
    return list(sources.values())


def _files_below(folder: str, skip: Iterable[str] = ()) -> list[str]:
    """List the files under a folder by sorted relative name; links are followed, each folder is entered once."""
    seen, names = set(), []
    for parent, folders, files in os.walk(folder, followlinks=True):
        seen.add(os.path.realpath(parent))
        folders[:] = sorted(
            name
            for name in folders
            if name[0] != "." and name not in skip and os.path.realpath(os.path.join(parent, name)) not in seen
        )
        names += [os.path.join(parent, name) for name in files if name[0] != "."]
    return sorted(names, key=lambda name: os.path.relpath(name, folder).split(os.sep))


def _text_pieces(file: BinaryIO, name: str) -> Iterator[tuple[str, bool]]:
    """Yield one document, cut after the last line end of each block (or anywhere in a block without one)."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    lines, carry, started = 0, "", False
    block = file.read(BLOCK_BYTES)
    while block:
        following = file.read(BLOCK_BYTES)
        try:
            text = carry + decoder.decode(block, final=not following)
        except UnicodeDecodeError as error:
            line = lines + error.object[: error.start].count(b"\n") + 1
            raise UserError(
                f"{name}:{line}: not UTF-8 ({error.reason}); convert the file, or name only the text files, for "
                "example DataConfig.path = 'folder/**/*.txt'"
            ) from error
        lines += block.count(b"\n")
        cut = len(text) if not following else text.rfind("\n") + 1 or len(text)
        carry = text[cut:]
        if text or started:
            started = True
            yield text[:cut], not following
        block = following


def _json_records(file: BinaryIO, name: str) -> Iterator[tuple[str, dict]]:
    """Yield (where, object) for each line but blank ones, or of a .json file for each of its list, or its only one."""
    whole, number = suffix_of(name) == ".json", 0
    read, most = (file.read, 8 * RECORD_BYTES) if whole else (file.readline, RECORD_BYTES)
    while data := read(most + 1):
        number += 1
        where = name if whole else f"{name}:{number}"
        if len(data) > most:
            raise UserError(f"{where}: has more than {most:,} bytes, the most at once; make it more lines of .jsonl")
        try:
            text = data.decode("utf-8-sig")
            if not text.strip():
                continue
            content = json.loads(text)
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: not UTF-8 ({error.reason}); convert the file") from error
        except (ValueError, RecursionError) as error:
            wanted = "JSON (if each line is, call it .jsonl)" if whole else "a JSON object on one line"
            raise UserError(f"{where}: not {wanted} ({error}); correct or remove it") from error
        for place, record in enumerate(content if whole and isinstance(content, list) else [content], start=1):
            at = f"{where}: record {place}" if whole else where
            if not isinstance(record, dict):
                raise UserError(f"{at}: holds a {type(record).__name__}, but must be a JSON object; correct it")
            yield at, record


def table_rows(path: str, columns: Sequence[str]) -> Iterator[tuple[dict, float]]:
    """Yield ({column: value}, share of the file read) for each row, with those of `columns` that there are.

    The first of them must be there.

    Raises:
      UserError: naming what is wrong with the file.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UserError(f"{path} needs the package 'pyarrow', which is not installed; pip install pyarrow") from error
    read = count = 0  # rows, where the file says how many it has
    try:
        if suffix_of(path) == ".parquet":  # a buffer would keep what was read until the end
            file = pq.ParquetFile(path, pre_buffer=False, page_checksum_verification=True)
            names, count = file.schema_arrow.names, file.metadata.num_rows
            # those that are not there, the first of all, are missed below
            batches = file.iter_batches(_ROWS, columns=[name for name in columns if name in names])
        else:
            source = pa.memory_map(path)
            try:
                reader = pa.ipc.open_stream(source)  # as `datasets` writes it
                batches: Iterator[pa.RecordBatch] = iter(reader)
            except pa.ArrowInvalid:
                reader = pa.ipc.open_file(source)
                batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
            names = reader.schema.names
        if columns[0] not in names:
            remedy = "set DataConfig.field, or name a table that has it"
            raise UserError(f"{path}: has no column {columns[0]!r} (it has {sorted(names)}); {remedy}")
        wanted = [name for name in columns if name in names]
        for batch in batches:
            batch.validate(full=True)  # a bad offset would be read out of bounds
            read += len(batch)
            share = read / count if count else source.tell() / source.size()
            for start in range(0, len(batch), _ROWS):
                yield from ((row, share) for row in batch.select(wanted).slice(start, _ROWS).to_pylist())
        if read < count:
            raise pa.ArrowInvalid(f"{read} of {count} rows")
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        what = " ".join(str(error).split())
        raise UserError(f"{path}: not a whole table ({what}); download or write it again") from error

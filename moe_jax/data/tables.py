"""Files of a dataset's folder to train on, and rows of Parquet and Arrow files, as downloaded or by `save_to_disk`.

Inputs: a file, names of columns. Outputs: its rows in their order, read a few at a time. pyarrow (extra [data]) is
imported when the first such file is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from absl import logging

from moe_jax.errors import UserError

TABLES, JSON, COLUMNS = (".parquet", ".arrow"), (".jsonl", ".ndjson", ".json"), (".csv", ".tsv")
_ROWS = 512  # that are in memory at once
# words between no letters, as the library `datasets` knows splits, and files that it writes next to the data
_SPLITS = re.compile(
    r"(?<![^\W\d_])(?:(train(?:ing)?)|validation|valid|val|dev|test(?:ing)?|eval(?:uation)?)(?![^\W\d_])", re.IGNORECASE
)
_NO_DATA = re.compile(r"cache-.*\.arrow|dataset_infos?\.json|dataset_dict\.json|state\.json")


def suffix_of(path: str) -> str:
    """Return the suffix that says how a file is read, in small letters and without '.gz'."""
    return os.path.splitext(path.lower().removesuffix(".gz"))[1]


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


def table_rows(path: str, columns: Sequence[str], *, is_text: bool) -> Iterator[tuple[dict, float]]:
    """Yield ({column: value}, share of the file read) for each row, with those of `columns` that there are.

    Args:
      columns: the first must be there; is_text: and must hold text, not lists.

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
            wanted = _known_columns(path, file.schema_arrow, columns, is_text, pa)
            batches, count = file.iter_batches(_ROWS, columns=wanted), file.metadata.num_rows
        else:
            source = pa.memory_map(path)
            try:
                reader = pa.ipc.open_stream(source)  # as `datasets` writes it
                batches: Iterator[pa.RecordBatch] = iter(reader)
            except pa.ArrowInvalid:
                reader = pa.ipc.open_file(source)
                batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
            wanted = _known_columns(path, reader.schema, columns, is_text, pa)
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


def _known_columns(path: str, schema, columns: Sequence[str], is_text: bool, pa) -> list[str]:
    column = columns[0]
    if column not in schema.names:
        remedy = "set DataConfig.field" if is_text else "conversations need it"
        raise UserError(f"{path}: has no column {column!r} (it has {sorted(schema.names)}); {remedy}")
    kind = schema.field(column).type
    if is_text and not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise UserError(f"{path}: column {column!r} holds {kind}, not text; set DataConfig.field")
    return [name for name in columns if name in schema.names]

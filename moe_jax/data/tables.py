"""Rows of Parquet and Arrow files, as datasets are downloaded and as `save_to_disk` writes them.

Inputs: a file, names of columns. Outputs: its rows in their order, read a few at a time. pyarrow (extra [data]) is
imported when the first such file is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from moe_jax.errors import UserError

SUFFIXES = (".parquet", ".arrow")
_ROWS = 512  # that are in memory at once
_SPLITS = re.compile(r"(train|validation|valid|dev|test)(?=$|[-_./\d])")


def training_tables(files: list[str], folder: str) -> list[str]:
    """Return the files of a dataset's folder that hold text to train on: all, where it is no dataset.

    Where there are tables or lines of JSON, other files describe them; where some are called after the training split,
    those of other splits are for evaluation; and `cache-...arrow` is what the library `datasets` computed.
    """
    tables = [name for name in files if name.endswith(SUFFIXES) and not os.path.basename(name).startswith("cache-")]
    if not tables:
        return files
    kept = [name for name in files if name in tables or name.endswith((".jsonl", ".jsonl.gz"))]
    train = [name for name in kept if _split_of(os.path.relpath(name, folder)) == "train"]
    return train or kept


def _split_of(path: str) -> str:
    """Return the split that a folder or file of a path is called after, as 'data/train-00000-of-00002.parquet' is."""
    found = [match[1] for part in reversed(path.split(os.sep)) if (match := _SPLITS.match(part))]
    return found[0] if found else ""


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
    try:
        if path.endswith(".parquet"):
            file = pq.ParquetFile(path, pre_buffer=False)  # which would keep what was read until the end
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
        read = 0
        for batch in batches:
            read += len(batch)
            share = read / count if path.endswith(".parquet") else source.tell() / source.size()
            for start in range(0, len(batch), _ROWS):
                yield from ((row, share) for row in batch.select(wanted).slice(start, _ROWS).to_pylist())
    except (pa.ArrowException, UnicodeDecodeError) as error:
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

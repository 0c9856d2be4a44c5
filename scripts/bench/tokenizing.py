"""Seconds and memory from Parquet to the token cache, on text that is made for it.

    python scripts/bench/tokenizing.py --gigabytes=20

Each document is 60 lines of Python's library in an order of its own, compressed with zstd. The cache is built in a
process of its own, byte by byte. Printed are tokens a second by the clock and by CPU seconds (on a machine with other
work the clock says less), and the most memory of the process, start and imports included. Everything written is removed
at the end; a gigabyte of text needs 2.4 on the disk.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from moe_jax.data.corpus import DataConfig, find_documents

LINES, ROWS = 60, 2000  # of a document; of a row group
BUILD = """
import sys
from moe_jax.data.cache import build_cache
from moe_jax.data.corpus import DataConfig
meta = build_cache(DataConfig(path=sys.argv[1], cache_dir=sys.argv[2])).meta
print(meta.tokens, meta.documents)
"""


def write_text(path: Path, size: int) -> None:
    """Write a Parquet file with `size` bytes of text in its column `text`."""
    texts = (text for source in find_documents(DataConfig()) for text, *_ in source.pieces())
    lines = [line for text in texts for line in text.splitlines(keepends=True)]
    rng, written = np.random.default_rng(0), 0
    with pq.ParquetWriter(path, pa.schema([("text", pa.string())]), compression="zstd") as writer:
        while written < size:
            picked = rng.integers(len(lines), size=(ROWS, LINES)).tolist()
            table = pa.table({"text": ["".join([lines[i] for i in row]) for row in picked]})
            writer.write_table(table)
            written += table.nbytes


def main() -> None:
    """Write the text, build the cache, print a line."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--gigabytes", type=float, default=0.2)
    flags.add_argument("--folder", help="where to write; a temporary folder by default")
    given = flags.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        text = Path(folder) / "text.parquet"
        write_text(text, round(given.gigabytes * 1e9))
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        command = [sys.executable, "-c", BUILD, str(text), f"{folder}/cache"]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        seconds, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    tokens, documents = map(int, out.split())
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    answer = {"tokens": tokens, "documents": documents, "seconds": round(seconds, 1),
              "tokens_per_second": round(tokens / seconds), "tokens_per_cpu_second": round(tokens / cpu),
              "peak_bytes": after.ru_maxrss * 1024}  # fmt: skip
    print(json.dumps(answer))


if __name__ == "__main__":
    main()

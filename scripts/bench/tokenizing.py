"""Seconds and memory from Parquet to the token cache, on text that is made for it.

    python scripts/bench/tokenizing.py --gigabytes=0.2 --tokenizer=bpe --workers=1,2
    python scripts/bench/tokenizing.py --gigabytes=20

Each document is 60 lines of Python's library in an order of its own, compressed with zstd. The cache is built in a
process of its own, once for each number of workers (threads of `tokenizers`); with `bpe` by a byte-level BPE of 32,768
ids learned from the library, otherwise byte by byte. Printed for each: tokens a second by the clock and by CPU seconds
(on a machine with other work the clock says less), and the most memory of the process, start and imports included.
Several numbers of workers must give the same tokens. Everything written is removed at the end; a gigabyte of
text needs 2.4 on the disk.
"""

import argparse
import json
import os
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
from moe_jax.data.train_tokenizer import train_tokenizer

LINES, ROWS = 60, 2000  # of a document; of a row group
BUILD = """
import sys
from moe_jax.data.cache import build_cache
from moe_jax.data.corpus import DataConfig
meta = build_cache(DataConfig(path=sys.argv[1], tokenizer=sys.argv[2], cache_dir=sys.argv[3])).meta
print(meta.tokens, meta.documents, meta.content)
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
    """Write the text, build the cache with each number of workers, print a line each."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--gigabytes", type=float, default=0.2)
    flags.add_argument("--tokenizer", choices=("byte", "bpe"), default="byte")
    flags.add_argument("--workers", default="2")
    flags.add_argument("--folder", help="where to write; a temporary folder by default")
    given = flags.parse_args()
    contents = set()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        text, tokenizer = Path(folder) / "text.parquet", given.tokenizer
        write_text(text, round(given.gigabytes * 1e9))
        if tokenizer == "bpe":
            tokenizer = f"{folder}/tokenizer.json"
            train_tokenizer(DataConfig(), tokenizer, 32768)
        for workers in given.workers.split(","):
            with tempfile.TemporaryDirectory(dir=folder) as cache:
                before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
                command = [sys.executable, "-c", BUILD, str(text), tokenizer, cache]
                environment = {**os.environ, "RAYON_NUM_THREADS": workers}
                out = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
                seconds, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
            tokens, documents, content = out.split()
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            contents.add(content)
            found = {
                "workers": int(workers),
                "tokens": int(tokens),
                "documents": int(documents),
                "seconds": round(seconds, 1),
                "tokens_per_second": round(int(tokens) / seconds),
                "tokens_per_cpu_second": round(int(tokens) / cpu),
                "peak_bytes": after.ru_maxrss * 1024,
            }
            print(json.dumps(found), flush=True)
    assert len(contents) == 1, "other tokens with another number of workers"


if __name__ == "__main__":
    main()

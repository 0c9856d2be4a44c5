"""The first conversations of a file as its tokenizer's chat template writes them, with the tokens that count in green.

python scripts/show_chats.py --data=chats.jsonl --tokenizer=tokenizer.json [--count=3]
"""

import argparse
import itertools

import numpy as np

from moe_jax.data.chat import ANSWER, ID_BITS, ChatTemplate
from moe_jax.data.corpus import DataConfig, find_documents
from moe_jax.data.tokenizer import Tokenizer, build_tokenizer
from moe_jax.errors import UserError


def show(marked: np.ndarray, tokenizer: Tokenizer) -> str:
    """Return marked ids as text for a terminal, with the answers' tokens in green."""
    parts, border = [], np.flatnonzero(np.diff(marked & ANSWER)) + 1
    for run in np.split(marked, border):
        text = tokenizer.decode(run & ID_BITS)
        parts.append(f"\033[32m{text}\033[0m" if run.size and run[0] & ANSWER else text)
    return "".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="a .jsonl, .parquet or .arrow file, a folder, glob or comma list")
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json, with a chat template next to it")
    parser.add_argument("--count", type=int, default=3, help="conversations to show")
    given = parser.parse_args()
    try:
        config = DataConfig(kind="chat", path=given.data, tokenizer=given.tokenizer)
        tokenizer = build_tokenizer(config)
        template = ChatTemplate(tokenizer)
        records = (record for source in find_documents(config) for record in source.records(("messages", "tools")))
        for where, record, _ in itertools.islice(records, given.count):
            (marked,) = template.encode_batch([template.read(record, where)])
            answers = np.count_nonzero(marked & ANSWER)
            print(f"--- {marked.size} tokens, {answers} of answers\n{show(marked, tokenizer)}")
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()

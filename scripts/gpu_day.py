"""The GPU benchmark in one command: what only a GPU can tell of this commit, in under nine minutes.

    python scripts/gpu_day.py --out=DIR

runs ten items on one GPU, in order of value, and writes DIR/gpu_day.json and DIR/gpu_day.md after each of them, so a
run that is cut off leaves what it had. It needs jax 0.10 to 0.12 as found, no network and no gin-config. Each item is a
child process, one at a time, with a time limit, killed by SIGKILL; what fails, crashes or takes too long is recorded
with the last lines of its stderr, and the next one runs.

    --items=1,3       only these             --limit=SECONDS   of all together (default 525)
    --tiny            sizes and devices of a CPU, as the tests take them (also where jax finds no GPU)

Exit codes: 0 when all items ran, 1 when some did not, 2 for a mistake in the command line.
"""

from __future__ import annotations

import argparse
import pathlib
import signal
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from gpu_day_items import day, plan  # noqa: E402  (neither loads jax: the GPU is the children's)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message):
        print(f"error: {message}; python scripts/gpu_day.py --help lists all flags", file=sys.stderr)
        sys.exit(2)


def chosen_items(text: str) -> tuple[plan.Item, ...]:
    """Return the items of '1,3', in order of value; all for ''."""
    known = {str(item.number): item for item in plan.ITEMS}
    wanted = [word.strip() for word in text.split(",")] if text else list(known)
    for word in wanted:
        if word not in known:
            raise ValueError(f"--items ({text!r}) names {word!r}; items are {', '.join(known)}")
    return tuple(item for number, item in known.items() if number in wanted)


def main() -> int:
    """Run the command line and return its exit code."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder for gpu_day.json and gpu_day.md; made if missing")
    parser.add_argument("--items", default="", help="numbers such as 1,3; all by default")
    parser.add_argument("--limit", type=float, default=525, help="seconds of all items together (default 525)")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on CPU devices")
    options = parser.parse_args()
    if not options.limit > 0:
        parser.error(f"--limit ({options.limit:g}) must be above 0 seconds")
    try:
        items = chosen_items(options.items)
        out = pathlib.Path(options.out)
        out.mkdir(parents=True, exist_ok=True)
        (out / "gpu_day.json").touch()
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"--out ({options.out!r}) cannot be written: {error.strerror or error}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return day.run(items, out, limit=options.limit, tiny=options.tiny, command=" ".join(sys.argv))


if __name__ == "__main__":
    sys.exit(main())

"""Compute the tables and figures of a paper again: printed, as CSV, and as one page with figures.

    python -m moe_jax.reproduce --paper=pro_prophet --out=DIR
    python -m moe_jax.reproduce --paper=parm --table=table_4 --out=DIR

Each row says whether it is modelled, simulated or measured, and each number of the paper gets a verdict; see
`moe_jax/papers/table.py`. --trace takes a run folder, a trace file, or a name of `moe_jax/papers/loads.py`.
A user's mistake is one line, exit code 2.
"""

from __future__ import annotations

import csv
import pathlib

from absl import flags

from moe_jax.config.command_line import parse_flags, run_command
from moe_jax.errors import UserError
from moe_jax.papers import PAPERS, tables_of
from moe_jax.papers.table import Inputs, MissingResults, Table, counted, text_of
from moe_jax.storage.run_folder import disk_errors_named

FLAGS = flags.FLAGS
flags.DEFINE_enum("paper", None, PAPERS, "paper whose tables are computed")
flags.DEFINE_list("table", [], "tables of it; all when not given")
flags.DEFINE_string("trace", None, "expert loads for all rows: a run folder, a file or a name; the shipped ones else")
flags.DEFINE_string("out", None, "folder for CSV files, figures and the page PAPER.md")


def reproduce() -> None:
    """Compute what the flags name; write it to --out."""
    if FLAGS.paper is None or FLAGS.out is None:
        raise UserError(f"--paper and --out are needed: one of {', '.join(PAPERS)}, and a folder")
    tables = tables_of(FLAGS.paper)
    for name in FLAGS.table:
        if name not in tables:
            raise UserError(f"--table {name!r} is unknown; {FLAGS.paper} has {', '.join(tables)}")
    out = pathlib.Path(FLAGS.out)
    out.mkdir(parents=True, exist_ok=True)
    inputs = Inputs(trace=FLAGS.trace)
    page, found = [f"# {FLAGS.paper}", ""], []
    for name in FLAGS.table or tables:
        try:
            table = tables[name](inputs)
        except MissingResults as error:
            if FLAGS.table:
                raise
            print(f"{name} is left out: {error}\n", flush=True)
            continue
        found.append(table)
        print("\n".join(table.lines()), flush=True)
        given = f"--paper={FLAGS.paper} --table={name}{f' --trace={FLAGS.trace}' if FLAGS.trace else ''} --out=DIR"
        page += table.markdown(name, f"python -m moe_jax.reproduce {given}", write(table, name, out))
    page += [counted(found), ""]
    print(page[-2])
    (out / f"{FLAGS.paper}.md").write_text("\n".join(page), encoding="utf-8")


def write(table: Table, name: str, out: pathlib.Path) -> str | None:
    """Write a table's CSV, and its figure where it has one, whose file name is returned."""
    with (out / f"{FLAGS.paper}_{name}.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(("prices", *table.columns))
        for level, found in table.levels.items():
            rows.writerows([level, *map(text_of, row)] for row in found)
    if table.draw is None:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    table.draw(table, figure.subplots())
    picture = f"{FLAGS.paper}_{name}.png"
    figure.savefig(out / picture, dpi=90)
    return picture


def command(argv: list[str]) -> None:
    """Carry out the command line."""
    parse_flags(argv, "moe_jax.reproduce", "paper")
    with disk_errors_named(FLAGS.out or "--out"):
        reproduce()


if __name__ == "__main__":
    run_command(command)

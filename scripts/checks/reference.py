"""Write docs/generated/bindings.md: every binding with its default and its meaning, from the config dataclasses.

    python scripts/checks/reference.py           writes the page
    python scripts/checks/reference.py --check   exit code 1 where the page is not what would be written

The meaning is that of the class docstrings' `Attributes:` (or `Args:`).
"""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
import re
import sys

from moe_jax.config.run_config import RunConfig, bindable

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "generated" / "bindings.md"
HEAD = """# Bindings

Written by `python scripts/checks/reference.py` from the config dataclasses; edit their docstrings, not this page. A
binding is given as `--gin_bindings='NAME = VALUE'`, or as a line of a gin file.
"""


def attributes_of(cls: type) -> dict[str, str]:
    """Return {field: meaning} of the entries in a class docstring, each as one line of text."""
    names = {field.name for field in dataclasses.fields(cls)}
    text = re.split(r"^(?:Attributes|Args):\n", inspect.cleandoc(cls.__doc__ or ""), flags=re.MULTILINE)[1:]
    entries = re.findall(r"^  (\S.*(?:\n    .*)*)", text[0] if text else "", re.MULTILINE)
    found = {}
    for entry in entries:
        line = " ".join(entry.split())
        # one entry may explain two fields: "model_dim: M; heads: H, attention heads."
        for part in re.split(rf"; (?=(?:{'|'.join(sorted(names))}): )", line):
            fields, _, meaning = part.partition(": ")
            found |= {name: meaning.rstrip(".") for name in fields.split(", ")}
    return found


def page() -> str:
    """Return the whole page.

    Raises:
      SystemExit: a field without a meaning.
    """
    lines = [HEAD]
    parts = RunConfig().by_name()
    for name, fields in bindable().items():
        cls = type(parts[name])
        meanings = attributes_of(cls)
        lines += [f"## {name}", "", "| binding | default | meaning |", "|---|---|---|"]
        for field in fields:
            if not meanings.get(field):
                raise SystemExit(f"{cls.__module__}: the docstring of {cls.__name__} does not explain {field}")
            meaning = meanings[field].replace("|", r"\|")
            lines.append(f"| `{name}.{field}` | `{getattr(parts[name], field)!r}` | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        return int(PAGE.read_text(encoding="utf-8") != page())
    if arguments:
        print("error: the only argument is --check", file=sys.stderr)
        return 2
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

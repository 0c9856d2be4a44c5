"""Which cluster files that ship with the project have a figure.

Inputs: a field of `Cluster`. Outputs: names, as text for an error. Files are searched as text, none is parsed.
"""

from __future__ import annotations

import pathlib
import re

FOLDER = pathlib.Path(__file__).parents[2] / "configs" / "cluster"


def presets_with(field: str) -> str:
    """Return '; it stands in configs/cluster/: a, b' for the presets that have the field, '' where none has."""
    line = re.compile(rf"^Cluster\.{re.escape(field)}\s*=", re.MULTILINE)
    names = [path.stem for path in sorted(FOLDER.glob("*.gin")) if line.search(path.read_text(encoding="utf-8"))]
    return f"; it stands in configs/cluster/: {', '.join(names)}" if names else ""

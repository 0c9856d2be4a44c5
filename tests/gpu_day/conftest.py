"""The scripts folder, and this one for the children's processes, are on the path."""

import pathlib
import sys

SCRIPTS = str(pathlib.Path(__file__).parents[2] / "scripts")
if SCRIPTS not in sys.path:
    sys.path.insert(0, SCRIPTS)

"""Lets the tests of this room import what they share, `layer_cases`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

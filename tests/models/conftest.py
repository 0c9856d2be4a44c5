"""Lets the tests of this room import what they share, `prefetch_cases`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

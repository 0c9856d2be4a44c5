"""Lets the tests of this room import what they share: `prefetch_cases`, and `program_order` of the schedules' tests."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "schedules")]

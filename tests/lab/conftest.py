"""The lab's modules are imported as its script does: from their own folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "lab"))

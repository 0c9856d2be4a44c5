"""The lab's modules stand beside its script; they are imported as that script does."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

"""How one MoE layer moves bytes: one contract (`moe/schedule.py`), many orders. See README.md."""

import importlib
import pkgutil

# Every file is imported, so that one which declares a schedule is known by being there.
for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

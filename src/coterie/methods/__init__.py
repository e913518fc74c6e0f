"""The methods, one file each, beside their papers. A file in this folder registers its class; no list is kept."""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

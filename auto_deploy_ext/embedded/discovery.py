"""Imports all modules of a package, so that what they register is registered."""

from __future__ import annotations

import importlib
import pkgutil


def import_submodules(package: str) -> list[str]:
    """Import each module directly inside an importable package and return their short names, sorted.

    Names that begin with an underscore are left out. The order is alphabetical on every machine, so registries
    fill up in the same order on every rank.

    Raises:
        Whatever importing one of the modules raises: a broken module is not skipped.
    """
    parent = importlib.import_module(package)
    names = sorted(found.name for found in pkgutil.iter_modules(parent.__path__) if not found.name.startswith("_"))
    for name in names:
        importlib.import_module(f"{package}.{name}")
    return names

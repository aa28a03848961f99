"""Puts another build of the native module in the place of the installed one, in this process and its children.

Python runs this file at its start where PYTHONPATH names this folder.  LANEWAY_NATIVE_VARIANT is the folder of the
other build: the module and all libraries that it loads.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

NAME = "laneway_native._llama"


class Finder(importlib.abc.MetaPathFinder):
    """Finds the module in one folder, before any other finder does."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's place; None for every other module."""
        if fullname != NAME:
            return None
        (file,) = self._folder.glob("_llama.*")
        return importlib.util.spec_from_file_location(fullname, file)


if variant := os.environ.get("LANEWAY_NATIVE_VARIANT"):
    sys.meta_path.insert(0, Finder(Path(variant)))

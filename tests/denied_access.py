"""Folders that this user may not read, also if the user is root, whom file modes do not stop."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def deny(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The folder cannot be listed, and what is in it cannot be reached."""
    for name in ("stat", "lstat", "open", "listdir", "scandir"):
        lists = name in ("listdir", "scandir")
        monkeypatch.setattr(os, name, _denying(getattr(os, name), folder, lists=lists))


def _denying(function: Callable[..., Any], folder: Path, *, lists: bool) -> Callable[..., Any]:
    def denying(path: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(path, str | Path):
            within = folder in Path(path).parents
            if within or (lists and Path(path) == folder):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return function(path, *arguments, **options)

    return denying

"""The `general` metadata of a checkpoint: name, license and recommended sampling."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gguf import GGUFValueType

from model_zoo.convert.vocabularies.files import TokenizerFiles
from model_zoo.convert.writer import MetadataField

_SNAPSHOT = re.compile(r"models--(?:.+--)?(?P<name>.+)")
_LICENSE = re.compile(r"^license:[ \t]*[\"']?(?P<license>[\w.+-]+)[\"']?[ \t]*$", re.MULTILINE)
_FRONT_MATTER = re.compile(r"\A---\n(?P<matter>.*?)\n---", re.DOTALL)
_SAMPLING: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "temperature": ("temp", float),
    "top_k": ("top_k", lambda count: MetadataField(int(count), GGUFValueType.INT32)),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "repetition_penalty": ("penalty_repeat", float),
}


def description(folder: Path, files: TokenizerFiles) -> dict[str, Any]:
    """The `general` keys: type, name, license, and the sampling of the generation settings."""
    keys: dict[str, Any] = {"general.type": "model", "general.name": _name(folder)}
    license = _license(folder)
    if license is not None:
        keys["general.license"] = license
    return keys | _sampling(files)


def _name(folder: Path) -> str:
    """The folder's name, or the model's name if the folder is a snapshot in a download cache."""
    resolved = folder.resolve()
    for parent in (resolved, *resolved.parents[:2]):
        snapshot = _SNAPSHOT.fullmatch(parent.name)
        if snapshot is not None:
            return snapshot["name"]
    return resolved.name or "model"


def _license(folder: Path) -> str | None:
    """The license in the front matter of the README."""
    readme = folder / "README.md"
    if not readme.is_file():
        return None
    matter = _FRONT_MATTER.match(readme.read_text(encoding="utf-8", errors="replace"))
    found = _LICENSE.search(matter["matter"]) if matter is not None else None
    return None if found is None else found["license"]


def _sampling(files: TokenizerFiles) -> dict[str, Any]:
    if files.generation.get("do_sample") is False:
        return {}
    keys = {}
    for key, (name, of) in _SAMPLING.items():
        stated = files.generation.get(key)
        if isinstance(stated, int | float):
            try:
                keys[f"general.sampling.{name}"] = of(stated)
            except (ValueError, OverflowError):  # not finite, or too large a number
                problem = f"has {str(stated)[:40]} as `{key}`"
                raise files.error("generation_config.json", problem) from None
    return keys

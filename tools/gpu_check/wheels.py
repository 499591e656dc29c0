"""Unpacks wheels of libraries that the machine lacks."""

import zipfile
from pathlib import Path

from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

BESIDE = Path(__file__).with_name("wheels")


def unpack(folder: Path, target: Path) -> list[Path]:
    """Unpacks the wheels in `folder` that this Python can use; returns folders for PYTHONPATH.

    Raises ValueError if there is none.
    """
    usable, places = set(sys_tags()), list[Path]()
    for wheel in sorted(folder.glob("*.whl")):
        _, _, _, tags = parse_wheel_filename(wheel.name)
        if usable & tags:
            places.append(target / wheel.stem)
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(places[-1])
    if not places:
        raise ValueError(f"{folder} has no wheel for this Python.")
    return places

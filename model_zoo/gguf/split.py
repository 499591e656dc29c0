"""Models split over several files: their names and consistency checks."""

import re
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

from model_zoo.gguf.header import Header, MetadataValue, TensorInfo
from runtime.errors import ModelFileError

_NAME = re.compile(r"(?P<prefix>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"


def further_parts(path: Path, metadata: Mapping[str, MetadataValue]) -> tuple[Path, ...]:
    """The other files of the model whose first file is `path`; none if it is not split.

    Their names are derived from the name of `path`, never from the content of a file.
    """
    count = _integer(path, metadata, _COUNT) if _COUNT in metadata else 0
    if count in (0, 1):
        return ()
    number = _integer(path, metadata, _NUMBER)
    name = _NAME.fullmatch(path.name)
    if name is None:
        raise ModelFileError(
            f"{path}: is one of {count:,} split files, so its name must end in "
            f"-00001-of-{count:05}.gguf; the names of the others follow from it."
        )
    first = f"{name['prefix']}-00001-of-{name['count']}.gguf"
    if number != 0:
        raise ModelFileError(
            f"{path}: is part {number + 1:,} of a split model; give its first part, {first}."
        )
    if int(name["count"]) != count:
        raise ModelFileError(
            f"{path}: `{_COUNT}` is {count:,}, but its name states {int(name['count']):,} files."
        )
    if int(name["number"]) != 1:
        raise ModelFileError(f"{path}: holds the first part (`{_NUMBER}` 0); name it {first}.")
    names = (f"{name['prefix']}-{n:05}-of-{count:05}.gguf" for n in range(2, count + 1))
    return tuple(path.with_name(other) for other in names)


def check_part(path: Path, metadata: Mapping[str, MetadataValue], number: int, count: int) -> None:
    """Raises ModelFileError unless the file is part `number` (from 0) of `count`."""
    stated = _integer(path, metadata, _NUMBER)
    if stated != number:
        raise ModelFileError(f"{path}: `{_NUMBER}` is {stated:,}; by its name it must be {number}.")
    if _COUNT in metadata and _integer(path, metadata, _COUNT) != count:
        raise ModelFileError(
            f"{path}: `{_COUNT}` is {_integer(path, metadata, _COUNT):,}; "
            f"the first part says {count:,}."
        )


def merged_tensors(parts: Mapping[Path, Header]) -> dict[str, TensorInfo]:
    """The tensors of all parts in order; ModelFileError for duplicates or a wrong total."""
    owners: dict[str, Path] = {}
    for path, header in parts.items():
        for name in header.tensors:
            if name in owners:
                raise ModelFileError(
                    f"{path}: tensor `{name}` is in {owners[name].name} too; "
                    "a tensor may be in one part only."
                )
            owners[name] = path
    path, header = next(iter(parts.items()))
    stated = _integer(path, header.metadata, _TENSORS)
    if len(owners) != stated:
        raise ModelFileError(
            f"{path}: `{_TENSORS}` is {stated:,}, but its {len(parts)} parts hold {len(owners):,}."
        )
    return dict(chain.from_iterable(part.tensors.items() for part in parts.values()))


def model_stem(path: Path) -> str:
    """The file name without suffix and part number."""
    name = _NAME.fullmatch(path.name)
    return path.stem if name is None else name["prefix"]


def _integer(path: Path, metadata: Mapping[str, MetadataValue], key: str) -> int:
    value = metadata.get(key)
    if value is None:
        raise ModelFileError(f"{path}: is a part of a split model, but has no `{key}`.")
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        shown = repr(value)[:40] if isinstance(value, int | float | str) else "an array"
        raise ModelFileError(f"{path}: `{key}` is {shown}, not a count.")
    return value

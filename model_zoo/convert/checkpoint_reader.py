"""Reads single tensors of a checkpoint's safetensors files."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from model_zoo.convert.configuration import read_json
from model_zoo.convert.quantization_methods import StoredForms
from model_zoo.convert.weight_forms import FLOATS, WeightForm
from runtime.errors import ModelFileError, UnsupportedModelError

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_BYTES = frozenset({"U8"})
# Folders of modules of a sentence transformer with tensors that follow those of the model.
_MODULES = "*_Dense"


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor, and its name in its shard."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    shard: Path
    handle: Any

    @property
    def wide_exponents(self) -> bool:
        return self.dtype == "BF16"

    def read(self, index: int | None = None) -> Tensor:
        """The whole tensor, or the slice `index` of its first dimension."""
        try:
            if index is None:
                return self.handle.get_tensor(self.name)
            return self.handle.get_slice(self.name)[index : index + 1].squeeze(0)
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"{self.shard}: `{self.name}` cannot be read: {error}.") from error

    def read_matching(self, index: int) -> Tensor:
        """The part for the slice `index` of a stack."""
        if prod(self.shape) == 1:
            return self.read()
        return self.read(index if self.shape[0] > 1 else 0)


@dataclass(frozen=True, slots=True)
class _Composed:
    """A weight that is stored as several tensors."""

    name: str
    shape: tuple[int, ...]
    form: WeightForm
    parts: Mapping[str, _Stored]

    @property
    def wide_exponents(self) -> bool:
        return all(part.dtype != "F16" for part in self.parts.values())

    def read(self, index: int | None = None) -> Tensor:
        """float32: the whole weight, or the slice `index` of its first dimension."""
        try:
            if index is None or not self.form.sliced:
                whole = self.form.numbers({end: part.read() for end, part in self.parts.items()})
                return whole if index is None else whole[index]
            return self.form.numbers(
                {end: part.read_matching(index) for end, part in self.parts.items()}
            )
        except IndexError as error:
            first = self.parts[self.form.first]
            raise ModelFileError(
                f"{first.shard}: `{first.name}` has groups without scales: {error}."
            ) from error

    @property
    def blocks(self) -> str | None:
        made = self.form.blocks
        return made.type if made is not None and made.exact(self.parts) else None

    def read_blocks(self) -> Tensor:
        assert self.form.blocks is not None
        return self.form.blocks.rows({end: part.read() for end, part in self.parts.items()})

    def factor(self) -> Tensor | None:
        """float32 [1]: the factor of the blocks, if they have one."""
        made = self.form.blocks
        return None if made is None or made.factor is None else made.factor(self.parts)


class Checkpoint:
    """Names, shapes and data of the tensors of a folder.

    Names of tensors in a module of a sentence transformer begin with the module's folder. A weight
    that one of `forms` stores as several tensors counts as one tensor.
    """

    def __init__(self, folder: Path, stored: Mapping[str, _Stored], forms: StoredForms) -> None:
        self.folder = folder
        self._stored = _composed(stored, forms)

    @property
    def names(self) -> Sequence[str]:
        return tuple(self._stored)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name].shape

    @property
    def wide_exponents(self) -> bool:
        """Whether most weights may exceed the range of F16, as BF16 and scaled ones may, and gain
        nothing from its precision."""
        counts = {True: 0, False: 0}
        for stored in self._stored.values():
            counts[stored.wide_exponents] += prod(stored.shape)
        return counts[True] > counts[False]

    def require(self, name: str, *, blocks: bool) -> None:
        """UnsupportedModelError unless the tensor holds floats, or bytes if `blocks`.

        ModelFileError if it is empty.
        """
        stored = self._stored[name]
        if not prod(stored.shape):
            raise ModelFileError(f"{self.folder}: `{name}` is empty: its shape is {stored.shape}.")
        if isinstance(stored, _Composed):
            if blocks:
                raise UnsupportedModelError(f"{self.folder}: `{name}` does not consist of blocks.")
        elif stored.dtype not in (_BYTES if blocks else FLOATS):
            raise UnsupportedModelError(
                f"{stored.shard}: `{name}` holds numbers of type {stored.dtype}; F32, F16, BF16, "
                "and fewer bits with scales that are stored beside them, can be converted. Convert "
                "a checkpoint that is not quantised."
            )

    def read(self, name: str, *, index: int | None = None) -> Tensor:
        """The stored tensor, or the slice `index` of its first dimension; in float32 if it is
        stored as several tensors."""
        return self._stored[name].read(index)

    def blocks(self, name: str) -> str | None:
        """The type of the GGUF blocks that hold this weight exactly, up to `factor`; None if there
        are none."""
        stored = self._stored[name]
        return stored.blocks if isinstance(stored, _Composed) else None

    def read_blocks(self, name: str) -> Tensor:
        """The blocks of a weight that has such `blocks`, uint8 [out, row bytes]."""
        stored = self._stored[name]
        assert isinstance(stored, _Composed)
        return stored.read_blocks()

    def factor(self, name: str) -> Tensor | None:
        """The factor of a weight's blocks, float32 [1]."""
        stored = self._stored[name]
        return stored.factor() if isinstance(stored, _Composed) else None


@contextmanager
def open_checkpoint(folder: Path, *, forms: StoredForms) -> Iterator[Checkpoint]:
    """Opens all shards. If several have a tensor, the index decides which counts.

    ModelFileError if one is missing, damaged or contradicts the index; UnsupportedModelError for a
    folder of pickles.
    """
    stored: dict[str, _Stored] = {}
    with ExitStack() as stack:
        for place in (folder, *sorted(folder.glob(_MODULES))):
            prefix = "" if place == folder else f"{place.name}."
            shards = _shards(place)
            listed = {name: shard for shard, names in shards.items() for name in names or ()}
            for shard, expected in shards.items():
                found = _open(stack, shard, expected)
                own = {n: tensor for n, tensor in found.items() if listed.get(n, shard) == shard}
                stored |= {prefix + name: tensor for name, tensor in own.items()}
        yield Checkpoint(folder, stored, forms)


def _composed(stored: Mapping[str, _Stored], forms: StoredForms) -> dict[str, _Stored | _Composed]:
    """The tensors, with each weight in place of its parts."""
    weights: dict[str, _Composed] = {}
    parts = {name for name in stored if name.endswith(forms.unused)}
    for name in stored:
        matching = [(form, form.names(name, stored)) for form in forms.forms]
        found = [(form, names) for form, names in matching if names is not None]
        if found:
            weight = _weight(name, stored, found)
            weights[weight.name] = weight
            parts.update(*(names.values() for _, names in found))
    plain = {name: tensor for name, tensor in stored.items() if name not in parts}
    for name in plain.keys() & weights.keys():
        raise ModelFileError(f"{plain[name].shard}: `{name}` is stored in two forms.")
    return {**plain, **weights}


def _weight(
    first: str, stored: Mapping[str, _Stored], found: Sequence[tuple[WeightForm, Mapping[str, str]]]
) -> _Composed:
    """The weight with this first part, in the first of the forms `found` that its parts fit."""
    for form, names in found:
        parts = {end: stored[name] for end, name in names.items()}
        for end, part in parts.items():
            if part.dtype not in form.types(end):
                raise UnsupportedModelError(
                    f"{part.shard}: `{part.name}` holds numbers of type {part.dtype}; "
                    f"{', '.join(sorted(form.types(end)))} can be converted."
                )
        shape = form.shape(parts)
        if shape is not None:
            return _Composed(first.removesuffix(form.first) + form.weight, shape, form, parts)
    shapes = ", ".join(f"`{name}` {list(stored[name].shape)}" for name in names.values())
    raise ModelFileError(
        f"{stored[first].shard}: these parts of a weight do not fit one another: {shapes}."
    )


def _shards(folder: Path) -> Mapping[Path, Sequence[str] | None]:
    """Each file with the tensors that the index assigns to it; None without an index."""
    if (folder / _INDEX).exists():
        weight_map = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, Mapping) or not weight_map:
            raise ModelFileError(f"{folder / _INDEX}: has no `weight_map`.")
        shards: dict[Path, list[str]] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise ModelFileError(f"{folder / _INDEX}: `{name}` is in no file of this folder.")
            shards.setdefault(folder / file, []).append(name)
        return shards
    if (folder / _SINGLE).exists():
        return {folder / _SINGLE: None}
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise UnsupportedModelError(
            f"{folder}: its weights are pickles, which can execute code when loaded; save them "
            "as safetensors first."
        )
    raise ModelFileError(f"{folder}: has neither `{_SINGLE}` nor `{_INDEX}`.")


def _open(stack: ExitStack, shard: Path, expected: Sequence[str] | None) -> dict[str, _Stored]:
    if not shard.exists():
        raise ModelFileError(f"{shard}: this shard of the checkpoint is missing.")
    try:
        handle: Any = stack.enter_context(safe_open(shard, framework="pt"))
        names = list(handle.keys())
    except (SafetensorError, OSError) as error:
        raise ModelFileError(f"{shard}: is no sound safetensors file: {error}.") from error
    missing = sorted(set(expected or ()) - set(names))
    if missing:
        raise ModelFileError(f"{shard}: the index says that it has {', '.join(missing[:8])}.")
    return {name: _described(shard, handle, name) for name in names}


def _described(shard: Path, handle: Any, name: str) -> _Stored:
    described = handle.get_slice(name)
    return _Stored(name, tuple(described.get_shape()), described.get_dtype(), shard, handle)

"""Reads single tensors of a checkpoint's safetensors files."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from model_zoo.convert.configuration import read_json
from model_zoo.convert.scaled_weights import (
    SCALED,
    Block,
    activation_scale_names,
    fits,
    scale_name,
    scaled,
)
from runtime.errors import ModelFileError, UnsupportedModelError

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_WIDE = frozenset({"BF16", SCALED})
_BYTES = frozenset({"U8"})
# Folders of modules of a sentence transformer with tensors that follow those of the model.
_MODULES = "*_Dense"


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor, its name in its shard, and its scales if it is of 8-bit floats."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    shard: Path
    handle: Any
    scale: "_Stored | None" = None


class Checkpoint:
    """Names, shapes and data of the tensors of a folder.

    Names of tensors in a module of a sentence transformer begin with the module's folder. Scales of
    8-bit floats are parts of their weights. `block`: as of `scale_block`.
    """

    def __init__(self, folder: Path, stored: Mapping[str, _Stored], block: Block | None) -> None:
        self.folder = folder
        self._stored = _with_scales(stored, block)
        self._block = block

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
            counts[stored.dtype in _WIDE] += prod(stored.shape)
        return counts[True] > counts[False]

    def require(self, name: str, *, blocks: bool) -> None:
        """UnsupportedModelError unless the tensor holds floats, or bytes if `blocks`.

        ModelFileError if it is empty.
        """
        stored = self._stored[name]
        if not prod(stored.shape):
            raise ModelFileError(f"{stored.shard}: `{name}` is empty: its shape is {stored.shape}.")
        if stored.scale is not None and not blocks:
            if stored.scale.dtype not in _FLOATS:
                raise UnsupportedModelError(
                    f"{stored.shard}: `{name}` has scales of type {stored.scale.dtype}; F32, F16 "
                    "and BF16 can be converted."
                )
        elif stored.dtype not in (_BYTES if blocks else _FLOATS):
            raise UnsupportedModelError(
                f"{stored.shard}: `{name}` holds numbers of type {stored.dtype}; F32, F16, BF16, "
                f"and {SCALED} with `{scale_name(name)}`, can be converted. Convert a checkpoint "
                "that is not quantised."
            )

    def read(self, name: str, *, index: int | None = None) -> Tensor:
        """The stored tensor, or the slice `index` of its first dimension; scaled weights in
        float32."""
        stored = self._stored[name]
        tensor = _read(stored, index)
        if stored.scale is None:
            return tensor
        scale = _read(stored.scale, None)
        if index is not None and scale.numel() > 1:
            scale = scale[index if len(scale) > 1 else 0]
        return scaled(tensor, scale, self._block)


@contextmanager
def open_checkpoint(folder: Path, *, block: Block | None) -> Iterator[Checkpoint]:
    """Opens all shards. A tensor that several have is that of the index. `block`: as of
    `scale_block`.

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
        yield Checkpoint(folder, stored, block)


def _with_scales(stored: Mapping[str, _Stored], block: Block | None) -> dict[str, _Stored]:
    """The tensors without the scales, which the scaled ones get."""
    found = dict(stored)
    for name, tensor in stored.items():
        scale = found.pop(scale_name(name), None) if tensor.dtype == SCALED else None
        if scale is None:
            continue
        if not fits(tensor.shape, scale.shape, block):
            raise ModelFileError(
                f"{scale.shard}: `{scale.name}` has the shape {scale.shape}, which does not fit "
                f"that of its weight, {tensor.shape}, and blocks of {block}."
            )
        found[name] = replace(tensor, scale=scale)
        for unused in activation_scale_names(name):
            found.pop(unused, None)
    return found


def _read(stored: _Stored, index: int | None) -> Tensor:
    """The whole tensor, or the slice `index` of its first dimension."""
    try:
        if index is None:
            return stored.handle.get_tensor(stored.name)
        return stored.handle.get_slice(stored.name)[index : index + 1].squeeze(0)
    except (SafetensorError, OSError) as error:
        raise ModelFileError(f"{stored.shard}: `{stored.name}` cannot be read: {error}.") from error


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

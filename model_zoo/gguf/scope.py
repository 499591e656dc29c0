"""Layers from a file's tensors, by name: what is missing, misshapen or left over is an error."""

import re
from collections.abc import Callable, Mapping
from typing import Literal, overload

import torch
from torch import Tensor

from model_zoo.gguf.reader import GGUFFile
from model_zoo.layers.linear import Embedding, FusedLinear, Linear
from model_zoo.layers.norm import LayerNorm, RMSNorm
from runtime.errors import ModelFileError
from runtime.quant import Weight, block_type

Progress = Callable[[int, int], None]
# Torch order; None where any size but nought is right.
Shape = tuple[int | None, ...]
META = torch.device("meta")
_LAYER = re.compile(r"^blk\.\d+")


class TensorScope:
    """The tensors under a name prefix, as layers on `device`.

    Matrices stay in the file's types: on a CPU views of the map, elsewhere copied once. A model is
    best built twice, first on the device "meta": that reads and copies nothing, and `check` then
    names all that is wrong with the file. On "meta" and after an error, layers hold no data.
    `context_tokens`: the longest sequence that will be served, None for what the file allows.
    """

    def __init__(
        self,
        file: GGUFFile,
        *,
        device: torch.device,
        dtype: torch.dtype,
        context_tokens: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._tensors = _Tensors(file, device, progress)
        self._prefix = ""
        self.device = device
        self.dtype = dtype
        self.context_tokens = context_tokens

    @property
    def loaded_bytes(self) -> int:
        """What all layers hold so far, tensors that they share counted once."""
        return self._tensors.loaded_bytes

    def scope(self, *parts: str | int) -> "TensorScope":
        """The tensors whose names go on with these parts: `w.scope("blk", 3)`."""
        inner = object.__new__(TensorScope)
        inner._tensors = self._tensors
        inner._prefix = self._prefix + "".join(f"{part}." for part in parts)
        inner.device, inner.dtype = self.device, self.dtype
        inner.context_tokens = self.context_tokens
        return inner

    def has(self, name: str) -> bool:
        return self._full(name) in self._tensors.file.tensors

    def shape(self, name: str, *, whole: bool = False) -> tuple[int, ...] | None:
        """That of the tensor `name`, in torch order; None where the file has none.

        `whole`: the name is given suffix and all.
        """
        full = self._prefix + name if whole else self._full(name)
        info = self._tensors.file.tensors.get(full)
        return None if info is None else info.shape

    @overload
    def linear(
        self, name: str, *, shape: Shape, alt: str | None = ..., optional: Literal[False] = ...
    ) -> Linear: ...
    @overload
    def linear(
        self, name: str, *, shape: Shape, alt: str | None = ..., optional: Literal[True]
    ) -> Linear | None: ...
    def linear(
        self, name: str, *, shape: Shape, alt: str | None = None, optional: bool = False
    ) -> Linear | None:
        """The matrix `name` (out, in), or where the file has none `alt`; its bias if it has one."""
        name = self._either(name, alt)
        if optional and self._tensors.lacks(self._full(name)):
            return None
        weight = self._tensors.weight(self._full(name), shape)
        return Linear(weight, self._bias(name, shape[0]))

    def fused_linear(
        self, shapes: Mapping[str, tuple[int, int]], *, whole: str | None = None
    ) -> FusedLinear:
        """Matrices of the same input, by name; `whole`: one tensor with the rows of all.

        They are multiplied as one where that costs nothing: when they have one type and lie end to
        end in the file, or are copied to a device anyway. On a CPU, joining others would turn
        pages of the file, which the system can drop and read again, into memory of our own.
        """
        sizes = tuple(out for out, _ in shapes.values())
        hidden = next(iter(shapes.values()))[1]
        if whole is not None and self.has(whole):
            return FusedLinear((self.linear(whole, shape=(sum(sizes), hidden)),), sizes)
        weights = {self._full(name): shape for name, shape in shapes.items()}
        biases = [self._bias(name, out) for name, (out, _) in shapes.items()]
        joined = self._tensors.joined(weights)
        if joined is None:
            parts = [self._tensors.weight(name, shape) for name, shape in weights.items()]
            return FusedLinear(tuple(map(Linear, parts, biases)), sizes)
        return FusedLinear((Linear(joined, _joined_bias(biases, sizes)),), sizes)

    def embedding(self, name: str, *, shape: Shape) -> Embedding:
        return Embedding(self._tensors.weight(self._full(name), shape), self.dtype)

    def weight(self, name: str, *, shape: Shape) -> Weight:
        """The tensor `name` in its blocks, of any number of dimensions: experts (n, out, in)."""
        return self._tensors.weight(self._full(name), shape)

    @overload
    def rms_norm(
        self,
        name: str,
        eps: float,
        *,
        size: int,
        alt: str | None = ...,
        optional: Literal[False] = ...,
    ) -> RMSNorm: ...
    @overload
    def rms_norm(
        self, name: str, eps: float, *, size: int, alt: str | None = ..., optional: Literal[True]
    ) -> RMSNorm | None: ...
    def rms_norm(
        self, name: str, eps: float, *, size: int, alt: str | None = None, optional: bool = False
    ) -> RMSNorm | None:
        """The norm `name`, or where the file has none `alt`."""
        name = self._either(name, alt)
        if optional and self._tensors.lacks(self._full(name)):
            return None
        return RMSNorm(self.vector(name, size=size), eps)

    def layer_norm(self, name: str, eps: float, *, size: int) -> LayerNorm:
        """The norm `name` with its bias, noughts where the file has none."""
        weight = self.vector(name, size=size)
        full = f"{self._prefix}{name}.bias"
        if self._tensors.lacks(full):
            return LayerNorm(weight, torch.zeros_like(weight), eps)
        return LayerNorm(weight, self._tensors.vector(full, size), eps)

    @overload
    def vector(
        self, name: str, *, size: int, bare: bool = ..., optional: Literal[False] = ...
    ) -> Tensor: ...
    @overload
    def vector(
        self, name: str, *, size: int, bare: bool = ..., optional: Literal[True]
    ) -> Tensor | None: ...
    def vector(
        self, name: str, *, size: int, bare: bool = False, optional: bool = False
    ) -> Tensor | None:
        """`name` as float32 [size]; with `bare` perhaps without the suffix of weights."""
        full = self._full(name)
        if bare and self._prefix + name in self._tensors.file.tensors:
            full = self._prefix + name
        if optional and self._tensors.lacks(full):
            return None
        return self._tensors.vector(full, size)

    def experts(self, name: str, *, shape: tuple[int, int | None, int | None]) -> Weight:
        """The matrices (experts, out, in); where the file has each as a tensor, those as one.

        The oldest files have `ffn_gate.0`, `ffn_gate.1` and so on for `ffn_gate_exps`.
        """
        single = name.removesuffix("_exps")
        if self.has(name) or not self.has(f"{single}.0"):
            return self.weight(name, shape=shape)
        names = [self._full(f"{single}.{expert}") for expert in range(shape[0])]
        return self._tensors.stacked(names, shape[1:])

    @overload
    def table(self, name: str, *, shape: Shape, optional: Literal[False] = ...) -> Tensor: ...
    @overload
    def table(self, name: str, *, shape: Shape, optional: Literal[True]) -> Tensor | None: ...
    def table(self, name: str, *, shape: Shape, optional: bool = False) -> Tensor | None:
        """`name`, suffix and all, as float32: such as the biases of experts (experts, out)."""
        full = self._prefix + name
        if optional and self._tensors.lacks(full):
            return None
        return self._tensors.numbers(full, shape)

    def need_biases(self, *names: str) -> None:
        """Of these matrices and norms, those that the file has must have biases."""
        wanted = (f"{self._prefix}{name}.bias" for name in names if self.has(name))
        self._tensors.missing += [name for name in wanted if name not in self._tensors.file.tensors]

    def ignore(self, *names: str) -> None:
        """These tensors may be there; nothing uses them."""
        self._tensors.claimed.update(map(self._full, names))

    def ignore_all(self) -> None:
        """Tensors under this prefix may be there; nothing uses them."""
        names = self._tensors.file.tensors
        self._tensors.claimed.update(name for name in names if name.startswith(self._prefix))

    def unclaimed(self) -> tuple[str, ...]:
        """The tensors of the whole file that no layer has asked for, in the file's order."""
        tensors = self._tensors
        return tuple(name for name in tensors.file.tensors if name not in tensors.claimed)

    def check(self) -> None:
        """ModelFileError unless every tensor asked for is there and sound, and no other is."""
        problems = {
            "missing": list(dict.fromkeys(self._tensors.missing + self._tensors.uneven())),
            "of the wrong shape": list(dict.fromkeys(self._tensors.misshapen)),
            "not known to this architecture": list(self.unclaimed()),
        }
        found = [
            f"{len(names):,} {'is' if len(names) == 1 else 'are'} {what} ({', '.join(names)})"
            for what, names in problems.items()
            if names
        ]
        if found:
            raise ModelFileError(f"{self._tensors.file.path}: of its tensors, {'; '.join(found)}.")

    def _either(self, name: str, alt: str | None) -> str:
        """`alt` where the file has that alone."""
        return alt if alt is not None and self.has(alt) and not self.has(name) else name

    def _bias(self, name: str, size: int | None) -> Tensor | None:
        full = f"{self._prefix}{name}.bias"
        if self._tensors.lacks(full):
            return None
        return self._tensors.vector(full, size).to(self.dtype)

    def _full(self, name: str) -> str:
        return f"{self._prefix}{name}.weight"


class _Tensors:
    """A file's tensors on one device, and the account of which were asked for."""

    def __init__(self, file: GGUFFile, device: torch.device, progress: Progress | None) -> None:
        self.file = file
        self.claimed: set[str] = set()
        self.missing: list[str] = []
        self.misshapen: list[str] = []
        self._absent: list[str] = []
        self.loaded_bytes = 0
        self._device = device
        self._progress = progress
        self._fetched_bytes = 0
        self._total_bytes = sum(info.nbytes for info in file.tensors.values())
        self._weights: dict[str, Weight] = {}

    def lacks(self, name: str) -> bool:
        """Whether the file has no tensor of that name, which it need not have; noted if so."""
        if name not in self.file.tensors:
            self._absent.append(name)
        return name not in self.file.tensors

    def uneven(self) -> list[str]:
        """Absent tensors that another layer has: such as the bias of one layer alone."""
        claimed = self.claimed & self.file.tensors.keys()
        present = {_LAYER.sub("blk", name) for name in claimed if _LAYER.match(name)}
        return [name for name in self._absent if _LAYER.sub("blk", name) in present]

    def weight(self, name: str, shape: Shape) -> Weight:
        if not self._claim(name, shape):
            return _nothing(len(shape))
        if name not in self._weights:
            self._fetch(name)
            self._weights[name] = weight = self.file.weight(name).to(self._device)
            self.loaded_bytes += weight.nbytes
        return self._weights[name]

    def joined(self, shapes: Mapping[str, tuple[int, int]]) -> Weight | None:
        """The rows of all as one weight; None where they must or should stay apart."""
        infos = [self.file.tensors.get(name) for name in shapes]
        if not all(info and info.shape == shapes[info.name] for info in infos):
            return None
        joined = self.file.adjacent_rows(list(shapes))
        parts = [self.file.weight(name) for name in shapes]
        if joined is None and (self._device.type == "cpu" or len({p.type for p in parts}) > 1):
            return None
        for name, shape in shapes.items():
            self._claim(name, shape)
            self._fetch(name)
        if joined is None:
            joined = _stacked(parts, self._device)
        joined = joined.to(self._device)
        self.loaded_bytes += joined.nbytes
        return joined

    def stacked(self, names: list[str], shape: Shape) -> Weight:
        """Tensors of one shape as one, its first dimension counting them.

        A view of the map where they lie at even distances; else they are copied.
        """
        sound = [self._claim(name, shape) for name in names]
        if not all(sound):
            return _nothing(len(shape) + 1)
        kinds = {(self.file.tensors[name].type, self.file.tensors[name].shape) for name in names}
        if len(kinds) > 1:
            self.misshapen.append(f"{names[0]} and its like differ in type or shape")
            return _nothing(len(shape) + 1)
        for name in names:
            self._fetch(name)
        even = self.file.evenly_spaced(names)
        if even is None:
            rows = _stacked([self.file.weight(name) for name in names], self._device)
            whole = (len(names), *self.file.tensors[names[0]].shape)
            even = Weight(rows.data.view(*whole[:-1], -1), rows.type, whole)
        weight = even.to(self._device)
        self.loaded_bytes += weight.nbytes
        return weight

    def vector(self, name: str, size: int | None) -> Tensor:
        return self.numbers(name, (size,))

    def numbers(self, name: str, shape: Shape) -> Tensor:
        """float32, of any number of dimensions."""
        if not self._claim(name, shape):
            return torch.empty([size or 0 for size in shape], device=META)
        self._fetch(name)
        numbers = self.file.weight(name).dequantize().to(self._device)
        self.loaded_bytes += numbers.nbytes
        return numbers

    def _claim(self, name: str, shape: Shape) -> bool:
        """Whether the file has this tensor in this shape; noted if not."""
        self.claimed.add(name)
        info = self.file.tensors.get(name)
        if info is None:
            self.missing.append(name)
            return False
        expected = zip(info.shape, shape, strict=False)
        if len(info.shape) == len(shape) and all(
            is_ == want or (want is None and is_) for is_, want in expected
        ):
            return True
        wanted = " x ".join("any" if size is None else str(size) for size in shape)
        self.misshapen.append(f"{name} is {' x '.join(map(str, info.shape))}, not {wanted}")
        return False

    def _fetch(self, name: str) -> None:
        """Read from disk now, so that loading takes the time and can tell how far it is."""
        if self._device == META:
            return
        for count in self.file.fetch(name):
            self._fetched_bytes += count
            if self._progress is not None:
                self._progress(self._fetched_bytes, self._total_bytes)


def _nothing(dimensions: int) -> Weight:
    """Stands in for a tensor that is not there, until `check` says so."""
    shape = (0,) * dimensions
    return Weight(torch.empty(shape, dtype=torch.uint8, device=META), block_type("F32"), shape)


def _stacked(parts: list[Weight], device: torch.device) -> Weight:
    """All rows in one new weight, each copied straight to the device."""
    first = parts[0]
    rows = sum(part.shape[0] for part in parts)
    data = torch.empty(rows, first.data.shape[1], dtype=torch.uint8, device=device)
    begin = 0
    for part in parts:
        data[begin : begin + part.shape[0]].copy_(part.data)
        begin += part.shape[0]
    return Weight(data, first.type, (rows, *first.shape[1:]))


def _joined_bias(biases: list[Tensor | None], sizes: tuple[int, ...]) -> Tensor | None:
    present = [bias for bias in biases if bias is not None]
    if not present:
        return None
    like = present[0]
    return torch.cat(
        [
            like.new_zeros(size) if bias is None else bias
            for bias, size in zip(biases, sizes, strict=True)
        ]
    )

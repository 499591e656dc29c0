"""Places a file's tensors, or parts of them, on devices and records which were requested."""

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from math import prod

import torch
from torch import Tensor

from model_zoo.gguf.header import TensorInfo
from model_zoo.gguf.mapped import MappedTensors
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.shared_weights import SharedWeights
from model_zoo.gguf.tiled_copy import TilingOptions, tiled_tensors
from runtime.distributed.ranks import Split
from runtime.kernels.auto_compute import on_this_cpu
from runtime.kernels.matmul import tiled_type
from runtime.kernels.triton.launch import has_kernels
from runtime.quant.block_types import TILE_ROWS, block_type
from runtime.quant.weight import PLANAR_TYPES, Compute, Weight, dequantize

Progress = Callable[[int, int], None]
# Shapes in torch order; None allows any size except 0.
Shape = tuple[int | None, ...]
META = torch.device("meta")
_PLAIN_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_LAYER = re.compile(r"^blk\.\d+")


def derived(make: Callable[..., Tensor], *read: Tensor) -> Tensor:
    """make(*read), for tensors that a layer computes from those of the file; the first of `read` if
    one is on "meta", where torch would load its compiler for arithmetic (a second, and 70 MB)."""
    return read[0] if any(each.is_meta for each in read) else make(*read)


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows [begin, end) of the matrix `name`, which has this shape in the file."""

    name: str
    shape: tuple[int, int]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A matrix within the tensor `name` (outs, hidden), from row `begin`."""

    name: str
    outs: int
    hidden: int
    begin: int

    def rows(self, full: str, outs: Split) -> RowRange:
        part = self.part(outs)
        return RowRange(full, (self.outs, self.hidden), part.begin, part.end)

    def part(self, outs: Split) -> Split:
        """The rows `outs` of this matrix, counted from the first row of the tensor."""
        return Split(((self.begin + outs.begin, self.begin + outs.end),), 0)


class Tensors:
    """The state that scopes share: one copy of a matrix per device, and the requested names.

    `shared`: copies that other models of the same file use. `compute`, `deterministic`: see
    `Weight`. `tiling`: how weights on a CPU that are only multiplied are had in tiles; None: they
    are the rows of the file.
    """

    def __init__(
        self,
        file: GGUFFile,
        progress: Progress | None,
        shared: SharedWeights | None = None,
        compute: Compute = Compute.EXACT,
        deterministic: bool = False,
        tiling: TilingOptions | None = None,
    ) -> None:
        self.file, self._tiling = file, tiling
        self._compute, self._deterministic = compute, deterministic
        self._shared = SharedWeights() if shared is None else shared
        self.claimed: set[str] = set()
        self.missing: list[str] = []
        self.misshapen: list[str] = []
        self.held: Counter[torch.device] = Counter()  # bytes
        self._absent: list[str] = []
        self._progress = progress
        self._read_bytes: Counter[str] = Counter()  # by tensor
        self._total_bytes = sum(info.nbytes for info in file.tensors.values())
        self._weights: dict[Hashable, Weight] = {}

    def lacks(self, name: str) -> bool:
        """Whether the file lacks this optional tensor; recorded if so."""
        if name not in self.file.tensors:
            self._absent.append(name)
        return name not in self.file.tensors

    def uneven(self) -> list[str]:
        """Absent optional tensors that another layer has, such as a bias in one layer only."""
        claimed = self.claimed & self.file.tensors.keys()
        present = {_LAYER.sub("blk", name) for name in claimed if _LAYER.match(name)}
        return [name for name in self._absent if _LAYER.sub("blk", name) in present]

    def ignore(self, name: str) -> None:
        """Counts the matrix `name`, also without the suffix, and its factors as requested."""
        stem = name.removesuffix(".weight")
        self.claimed |= {name, stem, f"{stem}.scale", f"{stem}.input_scale"}

    def weight(
        self,
        name: str,
        shape: Shape,
        device: torch.device,
        *,
        each: Split | None = None,
        outs: Split | None = None,
        ins: Split | None = None,
        tiled: bool = False,
        sparse: bool = False,
    ) -> Weight:
        """The matrix or matrices (..., out, in) of that shape.

        `each`, `outs` and `ins` select matrices (of (n, out, in)), outputs and inputs. `tiled`: in
        tiles if possible, for weights that are only multiplied. `sparse`: few rows are read.
        """
        if not self._claim(name, shape):
            return missing_weight(len(shape))
        source = self._source([name], device, tiled, outs, ins)
        key, part = (source is self.file, name, device), (each, outs, ins)
        if (*key, *part) not in self._weights:
            self._fetch(source, name, device, outs, each, sparse=sparse)
            whole = source.weight(name, dimensions=len(shape))
            some = whole if each is None else whole.matrices(each.begin, each.end)
            placed = self._placed((name, *part), device, _cut(some, outs, ins))
            if (source is not self.file, name, device, *part) in self._weights:
                self.held[device] -= placed.nbytes  # tiles and rows count once
            self._weights[*key, *part] = placed
        return self._weights[*key, *part]

    def transposed(self, weight: Weight, device: torch.device, dtype: torch.dtype) -> Weight:
        """A copy (n, in, out) of (n, out, in) in `dtype`, counted in `held`."""
        count, outs, ins = weight.shape
        shape, kind = (count, ins, outs), block_type(_PLAIN_TYPES[dtype])
        data = torch.empty(count, ins, kind.row_bytes(outs), dtype=torch.uint8, device=device)
        if not weight.data.is_meta and device != META:
            for matrix, copy in zip(weight.data, data, strict=True):
                rows = dequantize(matrix, weight.type).t().to(dtype).contiguous()
                copy.copy_(rows.view(torch.uint8))
        self.held[device] += data.nbytes
        return Weight(data, kind, shape, deterministic=self._deterministic)

    def joinable(
        self, shapes: Mapping[str, tuple[int, int]], device: torch.device
    ) -> Sequence[Mapping[str, tuple[int, int]]]:
        """`shapes` in groups of neighbours whose rows can be one weight without a cost in
        memory."""
        infos = [self.file.tensors.get(name) for name in shapes]
        alone = [{name: shape} for name, shape in shapes.items()]
        if not all(info and info.shape == shapes[info.name] for info in infos):
            return alone
        if self.file.adjacent_rows(list(shapes)) is not None:
            return [shapes]
        if device.type == "cpu":
            return alone
        runs = groupby(shapes, key=lambda name: self.file.tensors[name].type)
        return [{name: shapes[name] for name in names} for _, names in runs]

    def joined(self, shapes: Mapping[str, tuple[int, int]], device: torch.device) -> Weight:
        """The rows of all matrices, which are `joinable`, as one weight, in tiles if possible."""
        if len(shapes) == 1:
            ((name, shape),) = shapes.items()
            return self.weight(name, shape, device, tiled=True)
        source = self._source(list(shapes), device, True)
        for name, shape in shapes.items():
            self._claim(name, shape)
            self._fetch(source, name, device)
        key, whole = ("joined", *shapes), source.adjacent_rows(list(shapes))
        if whole is not None:
            return self._placed(key, device, whole)
        parts = [self.file.weight(name) for name in shapes]
        return self._copied(key, device, lambda: _stacked(parts, device))

    def rows(
        self, pieces: Sequence[RowRange], device: torch.device
    ) -> Sequence[tuple[Weight, int]]:
        """The pieces as weights, with the number of pieces in each: neighbours of one type together
        if they are copied anyway, otherwise each alone, in tiles if possible."""
        sound = [self._claim(piece.name, piece.shape) for piece in pieces]
        if not all(sound):
            return [(missing_weight(2), 1) for _ in pieces]
        views = []
        for piece in pieces:
            part = Split(((piece.begin, piece.end),), 0)
            source = self._source([piece.name], device, True, part)
            self._fetch(source, piece.name, device, part)
            views.append(_cut(source.weight(piece.name, dimensions=2), part, None))
        if device.type == "cpu":
            pairs = zip(pieces, views, strict=True)
            return [(self._placed(piece, device, view), 1) for piece, view in pairs]
        weights, begin = [], 0
        for _, run in groupby(views, key=lambda view: view.type):
            some = list(run)
            end = begin + len(some)
            copy = partial(_stacked, some, device)
            weights.append((self._copied(tuple(pieces[begin:end]), device, copy), len(some)))
            begin = end
        return weights

    def stacked(
        self,
        names: Sequence[str],
        shape: Shape,
        device: torch.device,
        *,
        outs: Split | None = None,
        ins: Split | None = None,
        tiled: bool = False,
    ) -> Weight:
        """Tensors of one shape, stacked along a new first dimension; `tiled`: as of `weight`.

        A view of the map if they are equidistant in the file, else a copy.
        """
        sound = [self._claim(name, shape) for name in names]
        if not all(sound):
            return missing_weight(len(shape) + 1)
        kinds = {(self.file.tensors[name].type, self.file.tensors[name].shape) for name in names}
        if len(kinds) > 1:
            self.misshapen.append(f"{names[0]} and its counterparts differ in type or shape")
            return missing_weight(len(shape) + 1)
        source = self._source(names, device, tiled, outs, ins)
        for name in names:
            self._fetch(source, name, device, outs)
        even = source.evenly_spaced(names, dimensions=len(shape))
        key = ("stacked", *names, outs, ins)
        if even is not None:
            return self._placed(key, device, _cut(even, outs, ins))
        views = (source.weight(name, dimensions=len(shape)) for name in names)
        parts = [_cut(view, outs, ins) for view in views]

        def stacked() -> Weight:
            return _stacked(parts, device).unflatten(len(names))

        return self._copied(key, device, stacked)

    def numbers(
        self, name: str, shape: Shape, device: torch.device, *, outs: Split | None = None
    ) -> Tensor:
        """A tensor as float32, of any number of dimensions; `outs`: a part of the last dimension.

        A vector may have leading dimensions of 1 in the file.
        """
        if not self._claim(name, shape, row=len(shape) == 1):
            return torch.empty([size or 0 for size in shape], device=META)
        self._fetch(self.file, name, device)
        numbers = self.file.weight(name, dimensions=len(shape)).dequantize()
        numbers = numbers.flatten() if len(shape) == 1 else numbers
        if outs is not None:
            numbers = numbers[..., outs.begin : outs.end].contiguous()
        self.held[device] += numbers.nbytes
        return numbers.to(device)

    def factors(self, name: str, stated: Shape, count: int, device: torch.device) -> Tensor | None:
        """The factors of products with the tensor `name`, float32 [count]: those in `<name>.scale`,
        if it has the shape `stated`, repeated if it has one element; None without such a tensor.

        Files of llama.cpp have them for NVFP4, whose blocks have no range of their own. The range
        of activations in four bits, `<name>.input_scale`, is not used.
        """
        stem = name.removesuffix("weight")
        self.claimed.add(f"{stem}input_scale")
        info = self.file.tensors.get(f"{stem}scale")
        if info is None or info.shape != stated:
            return None
        numbers = self.numbers(info.name, stated, device)
        factors = numbers.expand(count).contiguous()
        self.held[device] += factors.nbytes - numbers.nbytes
        return factors

    def _claim(self, name: str, shape: Shape, *, row: bool = False) -> bool:
        """Whether the file has this tensor with this shape, apart from leading dimensions of 1 that
        it does not state; recorded if not. `row`: those that it states do not count either."""
        self.claimed.add(name)
        info = self.file.tensors.get(name)
        if info is None:
            self.missing.append(name)
            return False
        stated = self.file.shape(name, len(shape))
        if row and prod(stated[:-1]) == 1:
            stated = stated[-1:]
        expected = zip(stated, shape, strict=False)
        if len(stated) == len(shape) and all(
            is_ == want or (want is None and is_) for is_, want in expected
        ):
            return True
        wanted = " x ".join("any" if size is None else str(size) for size in shape)
        self.misshapen.append(f"{name} is {' x '.join(map(str, info.shape))}, not {wanted}")
        return False

    def _placed(self, part: Hashable, device: torch.device, view: Weight) -> Weight:
        """A part of the map, on the device; `part` identifies it in the file."""
        return self._copied(part, device, lambda: _on_device(view, device))

    def _copied(self, part: Hashable, device: torch.device, copy: Callable[[], Weight]) -> Weight:
        """As `_placed`, for a part that `copy` places. Views of the map are not shared here,
        because models of one file share its pages anyway."""

        def computed() -> Weight:
            compute = self._on_cpu if device.type == "cpu" else self._compute
            return replace(copy(), compute=compute, deterministic=self._deterministic)

        if device.type in ("cpu", "meta"):
            placed = computed()
        else:
            key = self.file.identity, part, device, self._compute, self._deterministic
            placed = self._shared.get(key, computed)
        self.held[device] += placed.nbytes
        return placed

    @cached_property
    def _on_cpu(self) -> Compute:
        """How weights on the CPU are computed."""
        return on_this_cpu(self._compute, self.file.main_type or "")

    @cached_property
    def _tiles(self) -> MappedTensors | None:
        """The tensors in tiles, written now if no process has done so; None if no product would
        read them. Written tensors count as read: their pages are in memory."""
        if self._tiling is None or self._compute is Compute.EXACT:
            return None
        type_of = partial(tiled_type, compute=self._on_cpu)
        return tiled_tensors(self.file, self._tiling, type_of, self._report_read)

    def _source(
        self,
        names: Sequence[str],
        device: torch.device,
        tiled: bool,
        outs: Split | None = None,
        ins: Split | None = None,
    ) -> MappedTensors:
        """The tensors in tiles, if `tiled` and all of these have them, and `outs` are whole tiles
        and `ins` whole blocks of them; else the file."""
        if not tiled or device.type != "cpu" or self._tiles is None:
            return self.file
        infos = [self._tiles.tensors.get(name) for name in names]
        has_tiles = all(
            info is not None
            and _is_even(outs, TILE_ROWS)
            and _is_even(ins, info.type.block_elements)
            for info in infos
        )
        return self._tiles if has_tiles else self.file

    def _fetch(
        self,
        source: MappedTensors,
        name: str,
        device: torch.device,
        outs: Split | None = None,
        each: Split | None = None,
        *,
        sparse: bool = False,
    ) -> None:
        """Reads the tensor, or its rows `outs` or matrices `each`, from disk now, so that loading
        reports progress. `sparse`: see `MappedBytes.fetch`."""
        if device == META:
            return
        for begin, nbytes in _ranges(source.tensors[name], outs, each):
            for count in source.fetch(name, begin, nbytes, sparse=sparse):
                self._report_read(name, count)
        self._report_read(name, self.file.tensors[name].nbytes)  # other ranks hold the rest

    def _report_read(self, name: str, nbytes: int) -> None:
        """Each byte of a tensor is reported once, even if it is read again or in tiles, too."""
        new = min(nbytes, self.file.tensors[name].nbytes - self._read_bytes[name])
        self._read_bytes[name] += new
        if new and self._progress is not None:
            self._progress(self._read_bytes.total(), self._total_bytes)


def missing_weight(dimensions: int) -> Weight:
    """A placeholder for a tensor that is missing, until `check` raises the error."""
    shape = (0,) * dimensions
    return Weight(torch.empty(shape, dtype=torch.uint8, device=META), block_type("F32"), shape)


def _ranges(info: TensorInfo, outs: Split | None, each: Split | None) -> Iterator[tuple[int, int]]:
    """Begin and length in bytes of the rows `outs` of each matrix or the matrices `each`."""
    matrices = prod(info.shape[:-2])
    if outs is not None:
        assert each is None, "ranks divide the matrices of a tensor or their outputs, not both"
        row, rows = info.type.row_bytes(info.shape[-1]), (1, *info.shape)[-2]
        for number in range(matrices):
            yield (number * rows + outs.begin) * row, outs.count * row
    elif each is not None:
        matrix = info.nbytes // matrices
        yield each.begin * matrix, each.count * matrix
    else:
        yield 0, info.nbytes


def _is_even(part: Split | None, multiple: int) -> bool:
    """Whether the part begins and ends at multiples of this number."""
    return part is None or part.begin % multiple == part.end % multiple == 0


def _cut(weight: Weight, outs: Split | None, ins: Split | None) -> Weight:
    weight = weight if outs is None else weight.outputs(outs.begin, outs.end)
    return weight if ins is None else weight.inputs(ins.begin, ins.end)


def _on_device(weight: Weight, device: torch.device) -> Weight:
    """The weight on the device, in the form that its kernels read."""
    return weight.in_planes(device) if has_kernels(device) else weight.to(device)


def _stacked(parts: Sequence[Weight], device: torch.device) -> Weight:
    """All rows in one new weight; the parts are copied directly to the device, one by one."""
    first = parts[0]
    type = PLANAR_TYPES.get(first.type.name, first.type) if has_kernels(device) else first.type
    shape = sum(part.shape[0] for part in parts), first.shape[1]
    data = torch.empty(type.data_shape(shape), dtype=torch.uint8, device=device)
    begin = 0
    for part in parts:
        placed = part if type is first.type else part.in_planes(device)
        data[begin : begin + len(placed.data)].copy_(placed.data)
        begin += len(placed.data)
    return Weight(data, type, shape)

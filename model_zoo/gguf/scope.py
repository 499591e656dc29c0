"""Builds layers from a file's tensors by name; missing, misshapen or unused tensors are errors."""

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, overload

import torch
from torch import Tensor

from model_zoo.gguf.adapted_tensors import AdaptedTensors
from model_zoo.gguf.adapter import Adapter
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.shared_weights import SharedWeights
from model_zoo.gguf.tensors import Piece, Progress, Shape, Tensors
from model_zoo.gguf.tiled_copy import TilingOptions
from model_zoo.layers.linear import (
    AllGatherLinear,
    AllReduceLinear,
    Embedding,
    FusedLinear,
    Linear,
    Merging,
)
from model_zoo.layers.low_rank import LowRank
from model_zoo.layers.norm import LayerNorm, RMSNorm
from runtime.distributed.layer_placement import LayerPlacement
from runtime.distributed.ranks import ALONE, Ranks, Split, evenly
from runtime.errors import ModelFileError
from runtime.quant.weight import Compute, Weight


@dataclass(frozen=True, slots=True)
class ScopeOptions:
    """How layers are built from tensors, besides device and type.

    context_tokens: the longest sequence to serve; None: the file's maximum, and images of any size.
    ranks: the ranks that divide the model; with a `Split`, a layer holds the part of this rank, and
    its result is a part or, for layers that reduce or gather, whole.
    layer_placement: the device of each layer under the prefix `blk`; None: all on one device.
    adapters: adapters that change matrices of the file; layers compute their additions separately.
    shared: copies of weights that other models of this process use.
    compute, deterministic: how activations enter products and attention; see `Weight`.
    tiling: where copies of weights in tiles are kept, for scopes on a CPU; None: products use the
    rows of the file.
    progress(done, total): called with bytes read.
    """

    context_tokens: int | None = None
    ranks: Ranks = ALONE
    layer_placement: LayerPlacement | None = None
    adapters: Sequence[Adapter] = ()
    shared: SharedWeights | None = None
    compute: Compute = Compute.EXACT
    deterministic: bool = False
    tiling: TilingOptions | None = None
    progress: Progress | None = None


class TensorScope:
    """The tensors under a name prefix, as layers on `device`.

    Matrices keep the file's block types: on a CPU they are views of the map or, where they are only
    multiplied, of a mapped copy in tiles; elsewhere copies. A model should be built on the device
    "meta" first, which reads and copies nothing; `check` then lists all problems of the file. On
    "meta" and after an error, layers hold no data. Names and shapes are always those of the file,
    even where ranks divide a tensor.
    """

    def __init__(
        self,
        file: GGUFFile,
        *,
        device: torch.device,
        dtype: torch.dtype,
        options: ScopeOptions | None = None,
    ) -> None:
        options = options or ScopeOptions()
        self._tensors = Tensors(
            file,
            options.progress,
            options.shared,
            options.compute,
            options.deterministic,
            options.tiling if device.type == "cpu" else None,
        )
        self._adapted = AdaptedTensors(options.adapters, self._tensors.held, options.deterministic)
        self._options, self._prefix = options, ""
        self.device, self.dtype = device, dtype
        self.context_tokens, self.deterministic = options.context_tokens, options.deterministic

    @property
    def ranks(self) -> Ranks:
        return self._options.ranks

    @property
    def layer_placement(self) -> LayerPlacement | None:
        return self._options.layer_placement

    @property
    def loaded_bytes(self) -> int:
        """Bytes of all layers so far; shared tensors count once, also one that an embedding has in
        rows, of which it reads few, and a head in tiles."""
        return self.held.total()

    @property
    def held(self) -> Counter[torch.device]:
        """Bytes of all layers so far, by device."""
        return Counter(self._tensors.held)

    @property
    def added_row_elements(self) -> int:
        """Maximum number of temporary elements per row while an adapter's addition is computed."""
        return self._adapted.row_elements

    def scope(self, *parts: str | int) -> "TensorScope":
        """The tensors whose names continue with these parts: `w.scope("blk", 3)`."""
        inner = copy(self)
        inner._prefix = self._prefix + "".join(f"{part}." for part in parts)
        if self.layer_placement is not None and len(parts) > 1 and parts[0] == "blk":
            inner.device = self.layer_placement.layers[int(parts[1])]
        return inner

    def undivided(self) -> "TensorScope":
        """The same scope without ranks, layer placement and adapters, for models that rank 0 runs
        alone and that several text models may share."""
        inner = copy(self)
        inner._options = replace(self._options, ranks=ALONE, layer_placement=None, adapters=())
        inner._adapted = AdaptedTensors((), self._tensors.held)
        return inner

    def has(self, name: str) -> bool:
        return self._full(name) in self._tensors.file.tensors

    def shape(
        self, name: str, *, whole: bool = False, dimensions: int = 1
    ) -> tuple[int, ...] | None:
        """Shape of the tensor `name` in torch order, with at least `dimensions` dimensions; None if
        absent. `whole`: `name` includes the suffix."""
        full, file = self._prefix + name if whole else self._full(name), self._tensors.file
        return file.shape(full, dimensions) if full in file.tensors else None

    def block_elements(self, name: str) -> int:
        """Weights in a block of `name`, or of its first expert if each is a tensor; 1 if absent."""
        names = self._full(name), self._full(f"{name.removesuffix('_exps')}.0")
        infos = [self._tensors.file.tensors.get(full) for full in names]
        return next((info.type.block_elements for info in infos if info is not None), 1)

    def described(self, name: str) -> str:
        """File, tensor and block type, for error messages."""
        full, file = self._full(name), self._tensors.file
        kind = f" ({file.tensors[full].type.name})" if full in file.tensors else ""
        return f"{file.path}: {full}{kind}"

    @overload
    def linear(
        self,
        name: str,
        *,
        shape: Shape,
        alt: str | None = ...,
        optional: Literal[False] = ...,
        outs: Split | None = ...,
        ins: Split | None = ...,
    ) -> Linear: ...
    @overload
    def linear(
        self, name: str, *, shape: Shape, alt: str | None = ..., optional: Literal[True]
    ) -> Linear | None: ...
    def linear(
        self,
        name: str,
        *,
        shape: Shape,
        alt: str | None = None,
        optional: bool = False,
        outs: Split | None = None,
        ins: Split | None = None,
    ) -> Linear | None:
        """The matrix `name` (out, in), or else `alt`, with its bias and factor if there are any.

        Ranks divide its outputs or its inputs.
        """
        stated, outs, ins = name, self._divided(outs), self._divided(ins)
        name = self._either(name, alt)
        if optional and self._tensors.lacks(self._full(name)):
            return None
        full = self._full(name)
        weight = self._tensors.weight(full, shape, self.device, outs=outs, ins=ins, tiled=True)
        added = self._added(stated, self.shape(name, dimensions=2), outs=outs, ins=ins)
        bias = self._bias(name, shape[0], outs)
        return Linear(weight, bias, added, self._factors(name, weight.shape[0]))

    def fused_linear(
        self,
        shapes: Mapping[str, tuple[int, int]],
        *,
        whole: str | None = None,
        outs: Sequence[Split] | None = None,
    ) -> FusedLinear:
        """Matrices with the same input, by name.

        `whole`: name of a tensor with the rows of all of them, used if the file has it. `outs`: how
        ranks divide the outputs.

        Matrices of one type are multiplied as one if that costs no memory: if they are contiguous
        in the file, or if neighbours in `shapes` are copied to a device anyway. On a CPU, joining
        other ones would copy pages of the file, which the kernel can evict, to anonymous memory.
        """
        whole = whole if whole is not None and self.has(whole) else None
        if outs is not None and self.ranks.size > 1:
            return self._divided_linear(shapes, whole, outs)
        sizes = tuple(out for out, _ in shapes.values())
        hidden = next(iter(shapes.values()))[1]
        added = self._fused_added(shapes, whole)
        if whole is not None:
            shape = sum(sizes), hidden
            weight = self._tensors.weight(self._full(whole), shape, self.device, tiled=True)
            bias, factor = self._bias(whole, shape[0]), self._factors(whole, shape[0])
            return FusedLinear((Linear(weight, bias, factors=factor),), (sizes,), added)
        full = {self._full(name): shape for name, shape in shapes.items()}
        weights = [
            (self._tensors.joined(joined, self.device), len(joined))
            for joined in self._tensors.joinable(full, self.device)
        ]
        biases = [self._bias(name, out) for name, (out, _) in shapes.items()]
        factors = [self._factors(name, out) for name, (out, _) in shapes.items()]
        return FusedLinear.of(weights, sizes, biases, added, factors)

    def merging_linear(self, name: str, *, shape: tuple[int, int], ins: Split) -> Merging:
        """The matrix `name` with inputs divided among ranks; ranks all-reduce the result.

        If a block extends over two parts, the outputs are divided instead, and ranks all-gather
        input and result.
        """
        if not ins.whole and not ins.falls_on(self.block_elements(name)):
            outs = evenly(shape[0], self.ranks)
            return AllGatherLinear(self.linear(name, shape=shape, outs=outs), outs, ins, self.ranks)
        linear = self.linear(name, shape=shape, ins=ins)
        return AllReduceLinear(replace(linear, bias=None), linear.bias, self.ranks)

    def gathered_linear(
        self, name: str, *, shape: Shape, alt: str | None = None
    ) -> AllGatherLinear:
        """The matrix `name`, or else `alt`; ranks divide its outputs and all-gather the result.

        Its products may round their inputs to the model's type.
        """
        size = (self.shape(self._either(name, alt)) or (0,))[0]
        outs = evenly(size, self.ranks)
        linear = self.linear(name, shape=shape, alt=alt, outs=outs)
        return AllGatherLinear(replace(linear, operands=self.dtype), outs, None, self.ranks)

    def embedding(self, name: str, *, shape: Shape, divided: bool = False) -> Embedding:
        """The embedding `name` (rows, hidden). `divided`: each rank holds a part of the rows."""
        full, stated = self._full(name), self.shape(name, dimensions=2) or (0,)
        held = self._divided(evenly(stated[0], self.ranks)) if divided else None
        weight = self._tensors.weight(full, shape, self.device, outs=held, sparse=True)
        added = self._adapted.embedding_additions(full, stated, self.device, held=held)
        factors = self._factors(name, weight.shape[-1])
        return Embedding(weight, self.dtype, held, self.ranks, added, factors)

    def weight(
        self,
        name: str,
        *,
        shape: Shape,
        each: Split | None = None,
        outs: Split | None = None,
        ins: Split | None = None,
        tiled: bool = False,
    ) -> Weight:
        """The tensor `name` in its blocks, of any number of dimensions: experts (n, out, in).

        Ranks divide the matrices (`each`), their outputs or their inputs. `tiled`: possibly in
        tiles, for weights that are only multiplied.
        """
        each, outs, ins = self._divided(each), self._divided(outs), self._divided(ins)
        full = self._full(name)
        return self._tensors.weight(
            full, shape, self.device, each=each, outs=outs, ins=ins, tiled=tiled
        )

    def transposed(self, weight: Weight) -> Weight:
        """(n, out, in) -> a copy (n, in, out) in the model's type; blocks cannot be transposed."""
        return self._tensors.transposed(weight, self.device, self.dtype)

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
        """The norm `name`, or else `alt`; with or without the suffix `.weight`."""
        name = self._either(name, alt)
        if optional and self._tensors.lacks(self._full(name)):
            return None
        return RMSNorm(self.vector(name, size=size, bare=True), eps)

    def layer_norm(self, name: str, eps: float, *, size: int) -> LayerNorm:
        """The norm `name` with its bias, or zeros if it has none."""
        weight = self.vector(name, size=size)
        full = f"{self._prefix}{name}.bias"
        if self._tensors.lacks(full):
            return LayerNorm(weight, torch.zeros_like(weight), eps)
        return LayerNorm(weight, self._tensors.numbers(full, (size,), self.device), eps)

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
        """`name` as float32 [size]; `bare`: the tensor may lack the suffix `.weight`."""
        full = self._full(name)
        if bare and self._prefix + name in self._tensors.file.tensors:
            full = self._prefix + name
        if optional and self._tensors.lacks(full):
            return None
        return self._tensors.numbers(full, (size,), self.device)

    def experts(
        self,
        name: str,
        *,
        shape: tuple[int, int | None, int | None],
        outs: Split | None = None,
        ins: Split | None = None,
        tiled: bool = True,
    ) -> Weight:
        """The matrices (experts, out, in), stacked if the file has one tensor per expert; `tiled`:
        as of `weight`.

        The oldest files have `ffn_gate.0`, `ffn_gate.1` and so on for `ffn_gate_exps`.
        """
        single = name.removesuffix("_exps")
        if self.has(name) or not self.has(f"{single}.0"):
            return self.weight(name, shape=shape, outs=outs, ins=ins, tiled=tiled)
        names = [self._full(f"{single}.{expert}") for expert in range(shape[0])]
        outs, ins = self._divided(outs), self._divided(ins)
        return self._tensors.stacked(names, shape[1:], self.device, outs=outs, ins=ins, tiled=tiled)

    def expert_factors(self, name: str, count: int) -> Tensor | None:
        """The factors of products with each of `count` experts' matrices, float32 [count]; None
        for ones."""
        return self._tensors.factors(self._full(name), (count,), count, self.device)

    def expert_additions(
        self, name: str, *, outs: Split | None = None, ins: Split | None = None
    ) -> tuple[LowRank, ...]:
        """The additions of adapters to the matrices (experts, out, in) of one tensor."""
        outs, ins = self._divided(outs), self._divided(ins)
        return self._added(name, self.shape(name, dimensions=3), outs=outs, ins=ins)

    @overload
    def table(self, name: str, *, shape: Shape, optional: Literal[False] = ...) -> Tensor: ...
    @overload
    def table(
        self, name: str, *, shape: Shape, optional: Literal[True], outs: Split | None = ...
    ) -> Tensor | None: ...
    def table(
        self, name: str, *, shape: Shape, optional: bool = False, outs: Split | None = None
    ) -> Tensor | None:
        """The tensor `name`, suffix included, as float32, such as biases (experts, out)."""
        full = self._prefix + name
        if optional and self._tensors.lacks(full):
            return None
        return self._tensors.numbers(full, shape, self.device, outs=self._divided(outs))

    def need_biases(self, *names: str) -> None:
        """Requires a bias for each of these matrices and norms that the file has."""
        wanted = (f"{self._prefix}{name}.bias" for name in names if self.has(name))
        self._tensors.missing += [name for name in wanted if name not in self._tensors.file.tensors]

    def ignore(self, *names: str) -> None:
        """Allows these tensors, with or without the suffix `.weight`, and their factors, which
        nothing uses."""
        for name in names:
            self._tensors.ignore(self._full(name))

    def ignore_all(self) -> None:
        """Allows all tensors under this prefix, which nothing uses."""
        names = self._tensors.file.tensors
        self._tensors.claimed.update(name for name in names if name.startswith(self._prefix))

    def unclaimed(self) -> tuple[str, ...]:
        """All tensors of the file that no layer has requested, in the file's order."""
        tensors = self._tensors
        return tuple(name for name in tensors.file.tensors if name not in tensors.claimed)

    def check(self) -> None:
        """ModelFileError if tensors of the file or of adapters are missing, misshapen or unused."""
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
        self._adapted.check()

    def _either(self, name: str, alt: str | None) -> str:
        """`alt` if the file has it and lacks `name`."""
        return alt if alt is not None and self.has(alt) and not self.has(name) else name

    def _divided_linear(
        self, shapes: Mapping[str, tuple[int, int]], whole: str | None, outs: Sequence[Split]
    ) -> FusedLinear:
        """This rank's rows of each matrix; the matrices may be parts of the tensor `whole`."""
        pieces = [Piece(name, *shape, 0) for name, shape in shapes.items()]
        if whole is not None:
            rows, hidden = [piece.outs for piece in pieces], pieces[0].hidden
            before = [0, *accumulate(rows)]
            pieces = [Piece(whole, before[-1], hidden, begin) for begin in before[:-1]]
        weights = self._tensors.rows(
            [piece.rows(self._full(piece.name), o) for piece, o in zip(pieces, outs, strict=True)],
            self.device,
        )
        biases = [
            self._bias(piece.name, piece.outs, piece.part(o))
            for piece, o in zip(pieces, outs, strict=True)
        ]
        sizes, added = tuple(split.count for split in outs), self._fused_added(shapes, whole, outs)
        names = (piece.name for piece in pieces)
        factors = [self._factors(name, size) for name, size in zip(names, sizes, strict=True)]
        return FusedLinear.of(weights, sizes, biases, added, factors)

    def _added(
        self,
        name: str,
        shape: tuple[int, ...] | None,
        *,
        outs: Split | None = None,
        ins: Split | None = None,
    ) -> tuple[LowRank, ...]:
        """The additions of adapters to the tensor `name` of that shape; none if it is missing."""
        if shape is None:
            return ()
        return self._adapted.additions(self._full(name), shape, self.device, outs=outs, ins=ins)

    def _fused_added(
        self,
        shapes: Mapping[str, tuple[int, int]],
        whole: str | None,
        outs: Sequence[Split] | None = None,
    ) -> tuple[tuple[LowRank, ...], ...]:
        """The additions of adapters to each matrix, by its own name or as rows of `whole`.

        `outs`: the outputs of this rank; None for all.
        """
        total, begin, added = sum(out for out, _ in shapes.values()), 0, []
        for number, (name, (out, hidden)) in enumerate(shapes.items()):
            piece = Piece(whole or name, total, hidden, begin)
            held = Split(((0, out),), 0) if outs is None else outs[number]
            found = () if name == whole else self._added(name, (out, hidden), outs=held)
            if whole is not None:
                found += self._added(whole, (total, hidden), outs=piece.part(held))
            added.append(found)
            begin += out
        return tuple(added)

    def _divided(self, split: Split | None) -> Split | None:
        """The split, or None if this rank holds everything."""
        return None if split is None or split.whole else split

    def _bias(self, name: str, size: int | None, outs: Split | None = None) -> Tensor | None:
        full = f"{self._prefix}{name}.bias"
        if self._tensors.lacks(full):
            return None
        return self._tensors.numbers(full, (size,), self.device, outs=outs).to(self.dtype)

    def _factors(self, name: str, count: int) -> Tensor | None:
        return self._tensors.factors(self._full(name), (1,), count, self.device)

    def _full(self, name: str) -> str:
        return f"{self._prefix}{name}.weight"

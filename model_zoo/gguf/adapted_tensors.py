"""The additions of adapters to a model's tensors, on its devices; unused pairs are errors."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from model_zoo.gguf.adapter import Adapter, counted, listed
from model_zoo.gguf.tensors import META
from model_zoo.layers.low_rank import LowRank, LowRankRows, LowRankTypes
from runtime.distributed.ranks import Split
from runtime.errors import ModelFileError, UnsupportedModelError
from runtime.quant.weight import Weight

_LAYERS = "blk."


class AdaptedTensors:
    """The adapters of one model, and which of their pairs layers have requested.

    held: bytes by device, to which the bytes of the pairs are added. row_elements: maximum number
    of temporary elements per row while an addition is computed. deterministic: see `Weight`.
    """

    def __init__(
        self,
        adapters: Sequence[Adapter],
        held: Counter[torch.device],
        deterministic: bool = False,
    ) -> None:
        self._adapters, self._deterministic = tuple(adapters), deterministic
        self._claimed: list[set[str]] = [set() for _ in adapters]
        self._misshapen: list[list[str]] = [[] for _ in adapters]
        self._held = held
        self.row_elements = 0

    def additions(
        self,
        name: str,
        shape: tuple[int, ...],
        device: torch.device,
        *,
        outs: Split | None = None,
        ins: Split | None = None,
    ) -> tuple[LowRank, ...]:
        """The additions to the matrix or matrices (..., out, in), or to the part with the outputs
        `outs` or the inputs `ins`."""
        found = []
        for adapter in self._claim(name, shape):
            down, up = self._fetched(adapter, name, device)
            if ins is not None:
                _check_bounds(adapter, adapter.pair(name)[0], ins)
                down = down.inputs(ins.begin, ins.end)
            up = up if outs is None else up.outputs(outs.begin, outs.end)
            placed = self._placed(down, device), self._placed(up, device)
            found.append(LowRank(*placed, adapter.factor(name)))
        if name.startswith(_LAYERS):
            self.row_elements = max(self.row_elements, *(each.row_elements for each in found), 0)
        return tuple(found)

    def embedding_additions(
        self,
        name: str,
        shape: tuple[int, ...],
        device: torch.device,
        *,
        held: Split | None = None,
    ) -> tuple[LowRankRows | LowRankTypes, ...]:
        """The additions to an embedding (rows, hidden), or to its rows `held`."""
        found: list[LowRankRows | LowRankTypes] = []
        for adapter in self._claim(name, shape):
            down, up = self._fetched(adapter, name, device)
            kind = LowRankRows if adapter.holds_rows(name) else LowRankTypes
            if held is not None:
                assert kind is LowRankRows, "ranks divide the rows of the tokens' embedding only"
                down = down.outputs(held.begin, held.end)
            placed = self._placed(down, device), self._placed(up, device)
            found.append(kind(*placed, adapter.factor(name)))
        self.row_elements = max(self.row_elements, *(each.row_elements for each in found), 0)
        return tuple(found)

    def check(self) -> None:
        """ModelFileError for pairs of the wrong shape, and for pairs that no layer has
        requested."""
        for adapter, claimed, misshapen in zip(
            self._adapters, self._claimed, self._misshapen, strict=True
        ):
            path = adapter.file.path
            if misshapen:
                raise ModelFileError(
                    f"{path}: the adapter is for another model: {counted(misshapen)} of the wrong "
                    f"shape ({listed(misshapen)})."
                )
            unused = sorted(adapter.names - claimed)
            if unused:
                raise UnsupportedModelError(
                    f"{path}: the adapter changes tensors that the model lacks or that cannot be "
                    f"adapted ({listed(unused)})."
                )

    def _claim(self, name: str, shape: tuple[int, ...]) -> list[Adapter]:
        """The adapters that change this tensor; wrong shapes are recorded."""
        found = []
        for number, adapter in enumerate(self._adapters):
            if name not in adapter.names:
                continue
            self._claimed[number].add(name)
            if adapter.shape(name) == shape:
                found.append(adapter)
            else:
                stated = " x ".join(map(str, adapter.shape(name)))
                wanted = " x ".join(map(str, shape))
                self._misshapen[number].append(f"{name} is {wanted}, not {stated}")
        return found

    def _fetched(self, adapter: Adapter, name: str, device: torch.device) -> list[Weight]:
        """Both matrices of the pair, read from disk now."""
        pair = adapter.pair(name)
        for each in pair if device != META else ():
            for _ in adapter.file.fetch(each):
                pass
        return [adapter.file.weight(each) for each in pair]

    def _placed(self, weight: Weight, device: torch.device) -> Weight:
        self._held[device] += weight.nbytes
        return replace(weight.to(device), deterministic=self._deterministic)


def _check_bounds(adapter: Adapter, name: str, ins: Split) -> None:
    kind = adapter.file.tensors[name].type
    if not ins.falls_on(kind.block_elements):
        raise UnsupportedModelError(
            f"{adapter.file.path}: {name} ({kind.name}) has blocks of {kind.block_elements} "
            "inputs, which cannot be divided among the ranks; convert the adapter to F16."
        )

"""Launches of paged attention on CUDA devices.

Rows that are alone in their span are computed by `decode_kernel`, those of longer spans by
`prefill_kernel`, which sums in another order; where the result must be deterministic, the former
computes all rows. The grids depend on host values only, so no launch synchronises the device.
"""

from dataclasses import dataclass
from functools import cache
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from runtime.kernels.activations import (
    MOST_ROUNDED_ROWS,
    Activations,
    Rounded,
    RoundedActivations,
)
from runtime.kernels.attention import Distances, Scoring
from runtime.kernels.triton.attention_kernels import (
    LOG2_E,
    decode_kernel,
    merge_kernel,
    prefill_kernel,
)
from runtime.kernels.triton.cache_rows import BLOCK_BYTES, kernel_pages
from runtime.kernels.triton.launch import (
    BLACKWELL,
    HOPPER,
    capability,
    launch,
    next_power,
    tensor_cores_of,
    with_adjacent_elements,
)
from runtime.kernels.triton.rounded import empty_rounded, planes_of
from runtime.kernels.workspace import MOST_STATE_BYTES
from runtime.kv.cache_types import CacheType
from runtime.quant.weight import Compute
from runtime.worker.model import AttentionPlan, LayerPages, RowForm

LEAST_SPLIT = 128
# With fewer programs per multiprocessor, programs of decoding rows are divided until there are so
# many.
LEAST_PROGRAMS_EACH, PROGRAMS_EACH = 2, 4
# Decoding rows have contexts of very different lengths, and all others would wait for a program
# that computes the longest. So up to this number of rows, those of CUDA graphs, each that sees more
# positions than these has at least so many programs, if there is memory for their states.
MOST_DIVIDED_ROWS, MOST_WHOLE, LEAST_PARTS = 256, 2048, 4


def paged_attention(
    queries: Tensor,
    pages: LayerPages,
    plan: AttentionPlan,
    scoring: Scoring,
    *,
    deterministic: bool = False,
) -> Tensor:
    """As `runtime.kernels.attention.paged_attention`; operands of products have the type of the
    queries. The bits of a row depend neither on other rows nor on the device's size."""
    return _attended(queries, pages, plan, scoring, deterministic=deterministic, planes=0)[0]


def attended_rows(
    queries: Tensor,
    pages: LayerPages,
    plan: AttentionPlan,
    scoring: Scoring,
    *,
    deterministic: bool,
    rounding: Compute,
) -> Activations:
    """As `runtime.kernels.attention.attended_rows`."""
    result, rounded = _attended(
        queries, pages, plan, scoring, deterministic=deterministic, planes=planes_of(rounding)
    )
    rows = result.flatten(1)
    return rows if rounded is None else RoundedActivations(rows, rounded)


def _attended(
    queries: Tensor,
    pages: LayerPages,
    plan: AttentionPlan,
    scoring: Scoring,
    *,
    deterministic: bool,
    planes: int,
) -> tuple[Tensor, Rounded | None]:
    """The result and, with `planes`, the integers to which a launch has rounded it, if one has."""
    softcap, sinks, distances = scoring.softcap, scoring.sinks, scoring.distances
    rows, heads, key_dim = queries.shape
    kv_heads, value_dim = pages.keys.shape[2], pages.dims[1]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} heads of keys")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"the softcap is {softcap}; it must be above 0")
    queries = with_adjacent_elements(queries)
    result = queries.new_empty(rows, heads, value_dim)
    shape = Shape(
        heads, kv_heads, key_dim, value_dim, pages.keys.shape[1], pages.type, queries.dtype,
        softcap is not None, sinks is not None, tensor_cores_of(capability(queries.device)),
        pages.values_in_keys, distances is not None,
    )  # fmt: skip
    factors = _factors(scoring.scale, softcap)
    call = _Call(shape, queries, pages, plan, sinks, distances, result, factors)
    single, several = ((0, rows), None) if deterministic else _extents(plan, rows)
    rounded = None
    if single is not None:
        mixed = several is not None
        if planes and not mixed and rows <= MOST_ROUNDED_ROWS and call.can_round(rows):
            rounded = empty_rounded(rows, heads * value_dim, planes, queries.device)
        call.decode(*single, mixed=mixed, rounded=rounded)
    if several is not None:
        call.prefill(*several)
    return result, rounded


@dataclass(frozen=True, slots=True)
class Division:
    """The programs of each tile of heads of a decoding row; rows that see at most `most_whole`
    positions have one, as all rows have if `parts` is 1. The bits of a row are the same with any
    division."""

    parts: int
    most_whole: int = 0

    @property
    def whole(self) -> int:
        """WHOLE of `decode_kernel`."""
        return 2 if self.parts == 1 else int(self.most_whole > 0)


@dataclass(frozen=True, slots=True)
class Shape:
    """The constants that kernels are compiled for, and what follows from them."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    page_tokens: int
    type: CacheType
    dtype: torch.dtype
    capped: bool = False
    sinks: bool = False
    tensor_cores: tuple[int, int] = HOPPER
    values_in_keys: bool = False
    distances: bool = False

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.heads // self.kv_heads

    @property
    def row_bytes(self) -> int:
        """Bytes of a key or a value as an operand, whichever is larger."""
        return max(self.key_dim, self.value_dim) * self.dtype.itemsize

    @property
    def positions(self) -> int:
        """Positions of a block: as many as leave room for two blocks in 99 KB."""
        return 64 if self.row_bytes <= 256 else 32 if self.row_bytes <= 512 else 16

    @property
    def _crowded(self) -> bool:
        """Whether rows in float32 leave no room for loads in advance where a program may have only
        99 KB, as on most devices before Hopper."""
        stored = 0 if self.type.quantized else self.type.dtype.itemsize
        loaded_bytes = max(self.key_dim, self.value_dim) * max(self.dtype.itemsize, stored)
        return loaded_bytes > 2 * 576 and self.tensor_cores < HOPPER

    @property
    def splits(self) -> int:
        """Maximum number of parts into which the positions of a decoding row are divided; bounds
        the workspace."""
        return min(32, max(8, 4096 // self.value_dim))

    @property
    def tiles(self) -> int:
        """Tiles of query heads; a decoding program computes one of a row."""
        return self.kv_heads * -(-self.group // self.decode_heads)

    @property
    def _state_bytes(self) -> int:
        """Bytes of the states of all splits of a row."""
        sums = sum(self._parts(self.value_dim, self._decode_halves))
        return 4 * self.heads * self.splits * (sums + 2)

    @property
    def has_both_ways(self) -> bool:
        """Whether a program has registers for whole rows and parts of others: not those of wide
        heads or of heads that are not a power of two."""
        return self.row_bytes <= 256 and self._parts(self.value_dim, ())[1] == 0

    def division(self, rows: int, processors: int) -> "Division":
        """How programs share the splits of each of so many decoding rows."""
        programs, states = rows * self.tiles, rows * self._state_bytes
        if rows > MOST_DIVIDED_ROWS or states > MOST_STATE_BYTES:
            return Division(1)
        if programs >= LEAST_PROGRAMS_EACH * processors:
            return Division(LEAST_PARTS, MOST_WHOLE if self.has_both_ways else 0)
        return Division(min(self.splits, -(-PROGRAMS_EACH * processors // programs)))

    @property
    def decode_heads(self) -> int:
        """Query heads that a decoding program computes, at least 16 for tensor cores."""
        if self._crowded:
            return 16
        return max(16, min(64 if self.row_bytes <= 256 else 32, next_power(self.group)))

    @property
    def prefill_heads(self) -> int:
        """Pairs of a row and a query head that a program of prefill computes."""
        if self._crowded:
            return 16
        rows = 128 if self.row_bytes <= 256 else 64 if self.row_bytes <= 512 else 32
        return rows // 2 if self._half_prefill else rows

    @property
    def _prefill_positions(self) -> int:
        """Positions of a block. Before Hopper, tensor cores read keys and values from registers."""
        if self.type.quantized:
            return 16
        return self.positions if self.tensor_cores >= HOPPER else max(16, self.positions // 2)

    @property
    def _half_prefill(self) -> bool:
        """Whether prefill computes half a tile, by half the warps except with Q4_0, since registers
        have no room for more: float32 products on Blackwell, whose tensor cores lack them, and
        blocks of wide heads before Hopper."""
        if self.tensor_cores >= BLACKWELL:
            return self.dtype == torch.float32
        wide_blocks = self.type.quantized and 256 < self.row_bytes <= 512
        return wide_blocks and self.tensor_cores < HOPPER

    @property
    def _decode_halves(self) -> tuple[int, ...]:
        """Sizes of heads whose blocks decoding dequantises half by half, which takes them fewer
        instructions and registers. Others take more, or spill: 256 elements of Q8_0 on Hopper."""
        return (128, 256) if self.tensor_cores >= BLACKWELL else (128,)

    @property
    def _prefill_halves(self) -> tuple[int, ...]:
        """As `_decode_halves`, for prefill."""
        wide = () if self._is_q4_0 else (256,)
        if self.tensor_cores >= BLACKWELL:
            return wide
        return (128, 256) if self.tensor_cores >= HOPPER else (128, *wide)

    @property
    def _is_q4_0(self) -> bool:
        """Q4_0 takes more registers than Q8_0, for shifts."""
        return self.type is CacheType.Q4_0

    def _parts(self, dim: int, halves: tuple[int, ...]) -> tuple[int, int]:
        """One or two powers of two that have room for `dim` elements, the second possibly 0."""
        least = 32 if self.type.quantized else 16
        whole = max(least, next_power(dim))
        rest = max(least, next_power(max(1, dim - whole // 2)))
        halved = self.type.quantized and self.key_dim == self.value_dim and whole in halves
        divided = whole // 2 >= least and (halved or rest < whole // 2)
        return (whole // 2, rest) if divided else (whole, 0)

    def _constants(self, halves: tuple[int, ...]) -> dict[str, object]:
        """Constants of all kernels."""
        v1, v2 = self._parts(self.value_dim, halves)
        return {
            "HEADS": self.heads, "VALUE_DIM": self.value_dim, "V1": v1, "V2": v2,
            "SINKS": self.sinks,
        }  # fmt: skip

    def _read_constants(self, halves: tuple[int, ...]) -> dict[str, object]:
        """Constants of kernels that read the cache."""
        k1, k2 = self._parts(self.key_dim, halves)
        value_row = self.key_dim if self.values_in_keys else self.value_dim
        return self._constants(halves) | {
            "KV_HEADS": self.kv_heads, "KEY_DIM": self.key_dim, "K1": k1, "K2": k2,
            "VALUE_ROW": value_row,
            "PAGE_TOKENS": self.page_tokens, "BLOCK": BLOCK_BYTES[self.type], "CAPPED": self.capped,
            "DISTANCES": self.distances,
        }  # fmt: skip

    @property
    def decode_options(self) -> dict[str, Any]:
        decodes_blocks = self.type.quantized and self.tensor_cores >= BLACKWELL
        return self._read_constants(self._decode_halves) | self._division | {
            "M": self.decode_heads, "num_stages": 1 if self._crowded else 3,
            "maxnreg": self._decode_registers,
            "num_warps": 8 if decodes_blocks or self.row_bytes > 1024 else 4,
        }  # fmt: skip

    @property
    def _decode_registers(self) -> int | None:
        """The most registers of a thread. Of blocks, the assembler takes fewer and spills some."""
        if not self.type.quantized:
            return None
        return 255 if self._is_q4_0 or self.row_bytes > 256 else 168

    @property
    def merge_options(self) -> dict[str, Any]:
        return self._constants(self._decode_halves) | self._division | {"num_warps": 1}

    @property
    def prefill_options(self) -> dict[str, Any]:
        return self._read_constants(self._prefill_halves) | {
            "M": self.prefill_heads, "N": self._prefill_positions,
            "HEADS_AT_ONCE": min(self.group, self.prefill_heads),
            "num_warps": 4 if self._half_prefill and not self._is_q4_0 else 8,
            "num_stages": 1 if self._crowded else 2,
        }  # fmt: skip

    @property
    def _decode_positions(self) -> int:
        """Positions of a block. Dequantising cache blocks takes registers; where a tile is small,
        there are enough for more positions, which is a quarter faster for 64 sequences on an
        H200."""
        if self.type.quantized:
            return min(16, self.positions)
        whole = self._parts(self.key_dim, ())[1] == self._parts(self.value_dim, ())[1] == 0
        small = whole and self.row_bytes <= 256 and self.decode_heads == 16
        return 128 if small and self.type.dtype.itemsize == 2 else self.positions

    @property
    def _division(self) -> dict[str, int]:
        """How a decoding row's positions are divided."""
        return {"N": self._decode_positions, "SPLITS": self.splits, "LEAST_SPLIT": LEAST_SPLIT}


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """The arguments that the kernels share."""

    shape: Shape
    queries: Tensor
    pages: LayerPages
    plan: AttentionPlan
    sinks: Tensor | None
    distances: Distances | None
    result: Tensor
    factors: tuple[float, float]

    def can_round(self, rows: int) -> bool:
        """Whether `decode` of so many rows has a second launch, with whole groups in each head."""
        return self.shape.value_dim % 32 == 0 and self._division(rows).whole == 0

    def _division(self, rows: int) -> Division:
        return self.shape.division(rows, _processors(self.queries.device))

    def decode(self, first: int, end: int, *, mixed: bool, rounded: Rounded | None) -> None:
        """rounded: where all rows are also rounded to, if `can_round`."""
        shape, device = self.shape, self.queries.device
        count, tiles = end - first, shape.tiles
        division, options = self._division(count), shape.decode_options
        parts, whole = division.parts, division.whole
        cells = (count if parts > 1 else 0, shape.heads, shape.splits)
        states = self.result.new_empty(*cells, 2, dtype=torch.float32)
        width = options["V1"] + options["V2"]
        sums = self.result.new_empty(*cells, width, dtype=torch.float32)
        launch(
            decode_kernel, (count, tiles, parts), *self._reading(), states, sums,
            first, self.result.shape[0], parts, division.most_whole, *self._numbers(), **options,
            MIXED=mixed, WHOLE=whole, device=device,
        )  # fmt: skip
        if parts > 1:
            plan, integers = self.plan, (None,) * 3
            if rounded is not None:
                integers = rounded.planes, rounded.scales, rounded.sums
            launch(
                merge_kernel, (count, shape.heads), plan.row_slot, plan.visible_begin,
                plan.visible_end, self.sinks, states, sums, self.result, *integers, first,
                self.result.shape[0], division.most_whole, **shape.merge_options, MIXED=mixed,
                WHOLE=whole, PLANES=0 if rounded is None else len(rounded.planes),
                enable_fp_fusion=False, device=device, overlaps=True,
            )  # fmt: skip

    def prefill(self, first: int, end: int) -> None:
        shape, options = self.shape, self.shape.prefill_options
        together = options["HEADS_AT_ONCE"]
        tiles = -(-(end - first) // (options["M"] // together))
        grid = (tiles, shape.kv_heads * -(-shape.group // together))
        launch(
            prefill_kernel, grid, *self._reading(), first, end, self.result.shape[0],
            *self._numbers(), **options, device=self.queries.device,
        )  # fmt: skip

    def _reading(self) -> tuple[Tensor | None, ...]:
        plan, distances = self.plan, self.distances
        apart = (None, None) if distances is None else (distances.slopes, distances.positions)
        return (
            self.queries, *kernel_pages(self.pages), plan.page_table, plan.row_slot,
            plan.visible_begin, plan.visible_end, self.sinks, *apart, self.result,
        )  # fmt: skip

    def _numbers(self) -> tuple[int | float, ...]:
        table = self.plan.page_table.stride(0)
        return self.queries.stride(0), self.queries.stride(1), table, *self.factors


def _factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """Factors that make scores units of log2 and, with a softcap, the exponent of 2 in
    tanh x = 1 - 2 / (e^2x + 1)."""
    if softcap is None:
        return scale * LOG2_E.value, 0.0
    return 2 * scale / softcap * LOG2_E.value, softcap * LOG2_E.value


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _extents(
    plan: AttentionPlan, rows: int
) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """The range from the first to the last row that is alone in its span, and the range of the
    others. Adjacent spans of one slot count as one longer span: the kernels cannot tell them
    apart."""
    if plan.form is RowForm.ONE_SPAN:
        return None, (0, rows)
    if plan.form is RowForm.ONE_EACH or len(plan.spans) == rows > 0:
        return (0, rows), None
    found: list[tuple[int, int] | None] = [None, None]
    for _, adjacent in groupby(plan.spans, key=attrgetter("slot")):
        spans = list(adjacent)
        begin, end = spans[0].begin, spans[-1].end
        which = end - begin > 1
        seen = found[which]
        found[which] = (begin if seen is None else seen[0], end)
    return found[0], found[1]

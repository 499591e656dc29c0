"""Checks the kernel before attention and the writes to every type of cache against their twins."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.rope import Pairs, Rotation
from runtime.kernels.attention_inputs import HeadNorms, prepare_attention_twin
from runtime.kernels.cache_rows import decode_rows
from runtime.kernels.triton.attention_inputs import prepare_attention
from runtime.kv.cache_types import CacheType
from runtime.worker.model import AttentionPlan, LayerPages, QuantizedRows
from tools.gpu_check.comparison import check_close
from tools.gpu_check.report import Check, Task

HEADS, KV_HEADS, TOKENS = 6, 3, 5
# The norms of queries, keys and values, and of rotated queries and keys: with weights or without.
NORMS = {"none": "-----", "before": "ww---", "all before": "wwppp", "behind": "---wp"}
ROTATIONS = {"none": None, "halves": Pairs.NEOX, "interleaved": Pairs.INTERLEAVED}
# The largest difference of a stored number from the twin's: a step of the type, since a number at
# the boundary of two codes may become either.
STEPS = {
    CacheType.FLOAT32: 1e-5, CacheType.FLOAT16: 2e-3, CacheType.BFLOAT16: 2e-2,
    CacheType.Q8_0: 4e-2, CacheType.Q4_0: 0.7, CacheType.FP8: 0.3,
}  # fmt: skip
_DIMS = (96, 64)
Preparation = Callable[
    [Tensor, tuple[Tensor, Tensor], HeadNorms, Rotation | None, LayerPages, AttentionPlan], Tensor
]


def write_checks(task: Task) -> Iterator[Check]:
    for type in [CacheType.FLOAT32] if task.dry else CacheType:
        for norms in NORMS:
            for rotation in ROTATIONS:
                if not task.dry or (norms, rotation) == ("all before", "halves"):
                    name = f"preparation of attention, {type.value}, {norms}, {rotation}"
                    yield name, partial(_check, task, name, type, norms, rotation)


def _check(task: Task, name: str, type: CacheType, norms: str, rotation: str) -> None:
    draw, (key_dim, value_dim) = torch.Generator().manual_seed(8), _DIMS

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    wide = noise(TOKENS, HEADS + KV_HEADS, key_dim + 5)  # heads are parts of longer rows
    values, cells = noise(TOKENS, KV_HEADS, value_dim), torch.tensor([3, 34, 0, 7, 12])
    sizes = (key_dim, key_dim, value_dim, key_dim, key_dim)
    kinds = list(zip(NORMS[norms], sizes, strict=True))
    weights = [noise(size) if kind == "w" else None for kind, size in kinds]
    (cos, sin), pairs = (noise(TOKENS, 40), noise(TOKENS, 40)), ROTATIONS[rotation]

    def prepared(function: Preparation, device: torch.device) -> tuple[Tensor, LayerPages]:
        given = HeadNorms(*(
            None if kind == "-" else RMSNorm(None if weight is None else weight.to(device), 1e-3)
            for (kind, _), weight in zip(kinds, weights, strict=True)
        ))  # fmt: skip
        turned = None if pairs is None else Rotation(cos.to(device), sin.to(device), pairs)
        x, pages = wide.to(device), _empty_pages(type, device)
        unused = torch.zeros(0)
        plan = AttentionPlan(unused, unused, unused, unused, cells.to(device), ())
        stored = x[:, HEADS:, :key_dim], values.to(device)
        return function(x[:, :HEADS, :key_dim], stored, given, turned, pages, plan), pages

    got, pages = prepared(prepare_attention, task.device)
    twin, expected = prepared(prepare_attention_twin, torch.device("cpu"))
    check_close(task, name, got, twin)
    pages = replace(pages, keys=pages.keys.cpu(), values=pages.values.cpu())
    errors = [
        (decode_rows(one, type, dim).float() - decode_rows(other, type, dim).float()).abs().max()
        for one, other, dim in (
            (pages.keys, expected.keys, key_dim), (pages.values, expected.values, value_dim),
        )
    ]  # fmt: skip
    error = torch.stack(errors).max().item()
    task.report.check(f"{name}, stored", error <= STEPS[type], error=error)


def _empty_pages(type: CacheType, device: torch.device) -> LayerPages:
    keys, values = (
        torch.zeros(5, 7, KV_HEADS, type.width(dim), dtype=type.dtype, device=device)
        for dim in _DIMS
    )
    return LayerPages(keys, values, 0, QuantizedRows(type, *_DIMS) if type.quantized else None)

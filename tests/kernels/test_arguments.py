"""The C kernels refuse arguments that would cause accesses out of bounds."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runtime.kernels.attention import Scoring, paged_attention, write_cache
from runtime.kernels.delta import DeltaGates, gated_delta, short_convolution
from runtime.kernels.experts import clamped_swiglu, expert_products, weighted_sum
from runtime.kernels.matmul import matmul
from runtime.kernels.native import library
from runtime.kernels.pointwise import layer_norm, rms_norm, rope_halves, silu_mul
from runtime.kernels.selective_scan import Channels, ScanRows, selective_scan
from runtime.kernels.state_space import StateSpace, state_space
from runtime.kernels.wkv import WkvHeads, WkvRows, wkv7
from runtime.quant.block_types import block_type
from runtime.quant.weight import Weight
from runtime.worker.model import AttentionPlan, LayerPages, RowSpan

ROWS, HEADS, KV_HEADS, KEY, VALUE, PAGE = 3, 4, 2, 8, 6, 5


@pytest.fixture(autouse=True)
def native() -> None:
    if library() is None:
        pytest.skip("no C compiler here, so nothing is passed to C")


def dense(*shape: int) -> Weight:
    data = torch.zeros(*shape).view(torch.uint8)
    return Weight(data, block_type("F32"), shape)


def plan(**changes: Tensor) -> AttentionPlan:
    zeros = torch.zeros(ROWS, dtype=torch.int32)
    writes, spans = torch.zeros(ROWS, dtype=torch.int64), (RowSpan(0, ROWS, 0, 0),)
    table = torch.zeros(1, 1, dtype=torch.int32)
    return replace(AttentionPlan(table, zeros, zeros, zeros + 1, writes, spans), **changes)


def attend(key_dim: int = KEY, *, pages: LayerPages | None = None, **changes: Tensor) -> Tensor:
    keys, values = torch.zeros(1, PAGE, KV_HEADS, KEY), torch.zeros(1, PAGE, KV_HEADS, VALUE)
    queries = torch.zeros(ROWS, HEADS, key_dim)
    return paged_attention(
        queries, pages or LayerPages(keys, values, 0), plan(**changes), Scoring(1)
    )


def write(key_dim: int = KEY, *, cell: int = 0) -> None:
    pages = LayerPages(
        torch.zeros(1, PAGE, KV_HEADS, KEY), torch.zeros(1, PAGE, KV_HEADS, VALUE), 0
    )
    keys, values = torch.zeros(ROWS, KV_HEADS, key_dim), torch.zeros(ROWS, KV_HEADS, VALUE)
    write_cache(keys, values, pages, plan(write_cell=torch.tensor([0, cell, 1])))


def convolve(channels: int = 8, *, span: int = ROWS) -> Tensor:
    pages = LayerPages(torch.zeros(1, 3, 8), torch.zeros(1, 1), 0)
    spans = (RowSpan(0, span, 0, 0),)
    x, weight = torch.zeros(ROWS, channels), torch.zeros(4, channels)
    return short_convolution(x, weight, pages, replace(plan(), spans=spans))


def learn(width: int = 2 * 2 * KEY + 4 * VALUE, gates: int = 4, decays: int = 1) -> Tensor:
    pages = LayerPages(torch.zeros(1, 1), torch.zeros(1, 4, KEY, VALUE), 0)
    alphas, offsets = torch.zeros(ROWS, gates * decays), torch.zeros(gates * decays)
    numbers = DeltaGates(alphas, torch.zeros(ROWS, gates), -torch.ones(gates), offsets)
    return gated_delta(torch.zeros(ROWS, width), numbers, pages, plan(), key_heads=2, tiled=False)


def scan(width: int = 2 * 2 * KEY + 4 * VALUE, *, steps: int = 4, groups: int = 2) -> Tensor:
    pages = LayerPages(torch.zeros(1, 1), torch.zeros(1, 4, KEY, VALUE), 0)
    space = StateSpace(-torch.ones(4), torch.zeros(4), torch.zeros(4))
    mixed, numbers = torch.zeros(ROWS, width), torch.zeros(ROWS, steps)
    return state_space(mixed, numbers, space, pages, plan(), groups=groups)


def select(size: int = KEY, *, steps: int = 4, rates: int = KEY) -> Tensor:
    pages = LayerPages(torch.zeros(1, 1), torch.zeros(1, 4, KEY, 1), 0)
    channels = Channels(-torch.ones(4, rates), torch.zeros(4), torch.zeros(4))
    values, numbers = torch.zeros(ROWS, 4), torch.zeros(ROWS, steps)
    keys, queries = torch.zeros(ROWS, 2 * size).chunk(2, dim=1)
    return selective_scan(ScanRows(values, numbers, keys, queries), channels, pages, plan())


def recur(size: int = KEY, *, heads: int = 4, factors: int = 4) -> tuple[Tensor, Tensor]:
    pages = LayerPages(torch.zeros(1, 1), torch.zeros(1, 4, KEY, KEY), 0)
    parts = [torch.zeros(ROWS, heads * size) for _ in range(5)]
    numbers = [torch.zeros(factors * KEY) for _ in range(3)]
    return wkv7(WkvRows(*parts), WkvHeads(*numbers), pages, plan())


SOUND: dict[str, Callable[[], object]] = {
    "attend": attend,
    "write": write,
    "convolve": convolve,
    "learn": learn,
    "scan": scan,
    "select": select,
    "recur": recur,
}
REFUSED: dict[str, Callable[[], object]] = {
    "a state that is not as wide as the keys": lambda: recur(KEY + 1),
    "rows of fewer heads than the state": lambda: recur(heads=3),
    "factors of fewer heads than the state": lambda: recur(factors=3),
    "queries wider than the cached keys": lambda: attend(KEY + 1),
    "queries narrower than the cached keys": lambda: attend(KEY - 1),
    "keys of fewer pages than values": lambda: attend(
        pages=LayerPages(
            torch.zeros(1, PAGE, KV_HEADS, KEY), torch.zeros(2, PAGE, KV_HEADS, VALUE), 0
        )
    ),
    "keys and values of two types": lambda: attend(
        pages=LayerPages(
            torch.zeros(1, PAGE, KV_HEADS, KEY).half(), torch.zeros(1, PAGE, KV_HEADS, VALUE), 0
        )
    ),
    "kv heads that do not divide the heads": lambda: attend(
        pages=LayerPages(torch.zeros(1, PAGE, 3, KEY), torch.zeros(1, PAGE, 3, VALUE), 0)
    ),
    "a plan of fewer rows": lambda: attend(row_slot=torch.zeros(ROWS - 1, dtype=torch.int32)),
    "a written key that is too narrow": lambda: write(KEY - 1),
    "a cell behind the last one": lambda: write(cell=PAGE),
    "a cell before the first one": lambda: write(cell=-1),
    "a page table of 64 bits": lambda: attend(page_table=torch.zeros(1, 1, dtype=torch.int64)),
    "states of other channels": lambda: convolve(9),
    "a span beyond the batch": lambda: convolve(span=ROWS + 1),
    "mixed rows too narrow": lambda: learn(2 * 2 * KEY + 4 * VALUE - 1),
    "gates of too few heads": lambda: learn(gates=3),
    "decays of some elements of a key": lambda: learn(decays=2),
    "values too narrow": lambda: scan(2 * 2 * KEY + 4 * VALUE - 1),
    "steps of too few heads": lambda: scan(steps=3),
    "groups that do not divide the heads": lambda: scan(3 * 2 * KEY + 4 * VALUE, groups=3),
    "keys of another size": lambda: select(KEY - 1),
    "steps of too few channels": lambda: select(steps=3),
    "rates of another size": lambda: select(rates=KEY + 1),
    "a norm with weights of other groups": lambda: rms_norm(
        torch.zeros(2, 3, 4), torch.zeros(2, 4), 1e-5
    ),
    "a layer norm with biases of other groups": lambda: layer_norm(
        torch.zeros(2, 3, 4), torch.zeros(3, 4), torch.zeros(2, 4), 1e-5
    ),
    "a product of other lengths": lambda: matmul(torch.zeros(2, 5), dense(3, 4)),
    "a weight of fewer bytes than its shape": lambda: matmul(
        torch.zeros(2, 4), _unchecked(dense(3, 4), (3, 3))
    ),
    "experts of other lengths": lambda: expert_products(
        torch.zeros(2, 5), dense(3, 2, 4), torch.zeros(2, 1, dtype=torch.int64)
    ),
    "a bias of fewer experts": lambda: expert_products(
        torch.zeros(2, 4), dense(3, 2, 4), torch.zeros(2, 1, dtype=torch.int64),
        bias=torch.zeros(2, 2),
    ),
    "an expert that is not there": lambda: expert_products(
        torch.zeros(2, 4), dense(3, 2, 4), torch.full((2, 1), 3)
    ),
    "weights of other choices": lambda: weighted_sum(torch.zeros(2, 3, 4), torch.zeros(2, 2)),
    "gates and ups of two sizes": lambda: silu_mul(torch.zeros(2, 4), torch.zeros(2, 3)),
    "clamped gates of two sizes": lambda: clamped_swiglu(
        torch.zeros(2, 4), torch.zeros(2, 3), limit=7, slope=1
    ),
    "a norm of another size": lambda: rms_norm(torch.zeros(2, 4), torch.zeros(3), 1e-5),
    "a bias of another size": lambda: layer_norm(
        torch.zeros(2, 4), torch.zeros(4), torch.zeros(3), 1e-5
    ),
    "angles of fewer rows": lambda: rope_halves(
        torch.zeros(3, 1, 4), torch.zeros(2, 2), torch.zeros(2, 2)
    ),
    "more angles than dimensions": lambda: rope_halves(
        torch.zeros(3, 1, 4), torch.zeros(3, 3), torch.zeros(3, 3)
    ),
}  # fmt: skip


def _unchecked(weight: Weight, stored: tuple[int, int]) -> Weight:
    """`weight` with the blocks of a smaller one, which `Weight` itself refuses."""
    object.__setattr__(weight, "data", torch.zeros(stored).view(torch.uint8))
    return weight


@pytest.mark.parametrize("case", SOUND)
def test_undamaged_arguments_are_accepted(case) -> None:
    SOUND[case]()


@pytest.mark.parametrize("case", REFUSED)
def test_contradictory_arguments_are_refused(case) -> None:
    with pytest.raises(ValueError, match=r"\d"):
        REFUSED[case]()


def test_contradictory_arguments_are_refused_without_assertions() -> None:
    """`python -O` removes every assert."""
    code = (
        "from tests.kernels.test_arguments import REFUSED\n"
        "for case, call in REFUSED.items():\n"
        "    try:\n"
        "        call()\n"
        "    except ValueError:\n"
        "        continue\n"
        "    raise SystemExit(case)\n"
    )
    subprocess.run([sys.executable, "-O", "-c", code], check=True)

"""The choice of tokens on CUDA devices in Triton's interpreter, against its twin, and its code."""

import pytest
import torch

from runtime.kernels.token_choice import Budget, choose_tokens_twin
from runtime.kernels.triton import token_choice as kernels
from runtime.kv.cache_types import CacheType
from tests.cuda.compiled import compile_all
from tests.kernels.test_token_choice import BATCHES, BLOCKS, CAPACITY, scene

SIZES = {"all heads at once": (8, 24, 20), "heads in turn": (70, 40, 64), "one token": (1, 16, 1)}


@pytest.fixture(autouse=True)
def in_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs, blocks and groups of rows."""
    monkeypatch.setattr(kernels, "SCORED", 128)
    monkeypatch.setattr(kernels, "BLOCK", 64)
    monkeypatch.setattr(kernels, "MOST_SCORES", 30 * CAPACITY)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("size", SIZES)
def test_choices_are_those_of_the_twin(batch: str, size: str) -> None:
    heads, dim, most = SIZES[size]
    inputs = scene(batch, heads, dim)
    found, expected = (
        kernels.choose_tokens(*inputs, Budget(most)),
        choose_tokens_twin(*inputs, Budget(most)),
    )
    assert torch.equal(found.page_table, expected.page_table)
    for name in ("row_slot", "visible_begin", "visible_end"):
        assert torch.equal(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("blocks", BLOCKS)
def test_choices_of_blocks_are_those_of_the_twin(batch: str, blocks: str) -> None:
    heads, budget = BLOCKS[blocks]
    queries, _, *places = scene(batch, heads, 24)
    inputs = queries, None, *places, budget
    found, expected = kernels.choose_tokens(*inputs), choose_tokens_twin(*inputs)
    assert torch.equal(found.page_table, expected.page_table)
    for name in ("row_slot", "visible_begin", "visible_end"):
        assert torch.equal(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("type", CacheType)
def test_keys_may_be_of_any_type_of_cache(type: CacheType) -> None:
    inputs = scene("both", 8, 64, type)
    found, expected = (
        kernels.choose_tokens(*inputs, Budget(20)),
        choose_tokens_twin(*inputs, Budget(20)),
    )
    assert torch.equal(found.page_table, expected.page_table)


def test_of_equal_scores_the_first_positions_are_chosen() -> None:
    queries, weights, pages, plan, attended = scene("both", 2, 16)
    pages.keys.abs_()
    inputs = -queries.abs(), weights, pages, plan, attended
    found, expected = (
        kernels.choose_tokens(*inputs, Budget(9)),
        choose_tokens_twin(*inputs, Budget(9)),
    )
    assert torch.equal(found.page_table, expected.page_table)


def test_kernels_need_no_stack() -> None:
    assert_choice_code(90)


def assert_choice_code(capability: int) -> None:
    for name, code in compile_all("tests.cuda.choice_specimens", capability).items():
        assert code.stack == 0, (name, code)
        if name.startswith("scores"):
            assert code.count("HGMMA") or code.count("HMMA"), (name, code.instructions)

"""Checks for the kernels of every instruction set: a short form of the other tests here."""

import ctypes
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.kernels import delta, experts, routing, selective_scan, state_space, wkv
from runtime.kernels import matmul as matmul_room
from runtime.kernels.attention import paged_attention, paged_attention_twin
from runtime.kernels.matmul import matmul
from runtime.kernels.token_choice import choose_tokens
from runtime.kv.cache_types import CacheType
from runtime.quant.block_types import BLOCK_TYPES, MXFP4_PAIRS, block_type
from runtime.quant.weight import Compute, Weight
from tests.kernels import (
    sequence_steps,
    test_attention,
    test_cache_rows,
    test_delta,
    test_experts,
    test_integers,
    test_pointwise,
    test_recurrent_rules,
    test_routing,
    test_sixteen_bits,
    test_state_space,
    test_token_choice,
)
from tests.kernels.random_weights import random_weight, relative_error
from tests.tiles import in_tiles


def check_kernels(kernels: ctypes.CDLL | Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kernels`: instead of those of this processor."""
    monkeypatch.setattr(matmul_room, "library", lambda: kernels)
    monkeypatch.setattr(test_attention.room, "library", lambda: kernels)
    for type in (*BLOCK_TYPES.values(), MXFP4_PAIRS):
        elements = 77 if type.block_elements == 1 else 512
        weight, x = random_weight(type, 31, elements), torch.randn(37, elements)
        got = matmul(x, weight)
        assert relative_error(got, x, weight) < 1e-6
        assert torch.equal(matmul(torch.eye(elements), weight), weight.dequantize().T)
        assert all(
            torch.equal(matmul(x[:rows], weight), got[:rows]) for rows in (1, 2, 3, 8, 9, 25)
        )
    for type, compute in product(test_integers.TYPES, (Compute.FINE, Compute.FAST)):
        weight = test_integers.integer_weight(type, 31, 512, compute)
        got = matmul(x := torch.randn(9, 512), weight)
        computed = test_integers.rounded(x, compute) if kernels.caravan_has_integers() else x
        assert relative_error(got, computed, weight) < 1e-6
        assert torch.equal(matmul(x[:1], weight), got[:1])
        if kernels.caravan_has_integers():
            rows = test_integers.integer_weight(type, 80, 512, compute)
            assert torch.equal(matmul(x, in_tiles(rows)), matmul(x, rows))
    check_fused_sums(fused=kernels.caravan_level() not in (b"x86-64", b"generic"))
    check_caches()
    check_choices()
    monkeypatch.setattr(test_pointwise.pointwise, "library", lambda: kernels)
    check_norms_rotations_and_curves()
    for module in (delta, experts, routing, selective_scan, state_space, wkv):
        monkeypatch.setattr(module, "library", lambda: kernels)
    check_experts()
    check_recurrent_layers()


def integer_products(
    kernels: ctypes.CDLL | Any, monkeypatch: pytest.MonkeyPatch
) -> dict[tuple[str, str, int], Tensor]:
    """Products of every type with integers, and of rounded BF16 without tile registers, whose bits
    are those of all instruction sets."""
    monkeypatch.setattr(matmul_room, "library", lambda: kernels)
    few, many, found = 9, 101, {}  # many, and not a multiple of 16: AMX computes those
    x = test_integers.random_rows(many, 512)
    for type, compute in product(test_integers.TYPES, (Compute.FINE, Compute.FAST)):
        weight = test_integers.integer_weight(type, 50, 512, compute)
        for rows in (few, many):
            found[type.name, compute.name, rows] = matmul(x[:rows], weight)
    tiles = test_sixteen_bits.tiled(block_type("F16"), 48, 512)
    if kernels.caravan_matmul_knows(tiles.type.id, tiles.compute):
        for rows in (few, many):
            found["F16", "FINE", rows] = matmul(x[:rows], tiles)
    if not kernels.caravan_level().endswith(b"-amx"):
        rounded = test_integers.integer_weight(block_type("BF16"), 50, 500, Compute.FAST)
        found["BF16", "FAST", 37] = matmul(test_integers.random_rows(37, 500), rounded)
    return found


def check_fused_sums(*, fused: bool) -> None:
    """Whether products are added before they are rounded, in sums of every number of rows: what
    remains of the second of two products that cancel is then the error of the first one."""
    x, weight, factor = torch.zeros(37, 32), torch.zeros(31, 32), 1 + 2.0**-12
    x[:, [0, 16]], weight[:, 0], weight[:, 16] = factor, -factor, factor
    stored = Weight(weight.view(torch.uint8), block_type("F32"), (31, 32))
    for rows in (1, 2, 3, 9, 37):
        assert (matmul(x[:rows], stored) == (2.0**-24 if fused else 0.0)).all()


def check_caches() -> None:
    for type in (CacheType.FLOAT32, CacheType.FLOAT16, CacheType.Q8_0):
        test_cache_rows.test_kernel_and_twin_write_the_same_bits(type, "all share, tiny")
        queries, pages, plan = test_attention.scene(
            "prefill and decode", "three share, odd sizes", type=type
        )
        options = test_attention.options_of("capped, sinks", queries.shape[1])
        got = paged_attention(queries, pages, plan, options)
        expected = paged_attention_twin(queries, pages, plan, options)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    test_attention.test_scores_fall_with_distance("three share, odd sizes", "capped, sinks")


def check_choices() -> None:
    for type, heads in ((CacheType.FLOAT32, 8), (CacheType.BFLOAT16, 7), (CacheType.Q8_0, 3)):
        test_token_choice.test_choices_are_those_of_the_twin("both", type, heads, 40, 20)
    for blocks in test_token_choice.BLOCKS:
        test_token_choice.test_choices_of_blocks_are_those_of_the_twin(CacheType.FLOAT16, blocks)
    for block in (1, 4):
        test_token_choice.test_scores_that_are_not_numbers_are_the_highest(choose_tokens, block)


def check_norms_rotations_and_curves() -> None:
    """Compared with the twins, as in the other tests of the kernels."""
    test_pointwise.test_rms_norm_agrees_with_torch((3, 77), torch.float32)
    test_pointwise.test_parts_of_rows_may_have_weights_of_their_own()
    test_pointwise.test_layer_norm_agrees_with_torch((3, 77), torch.float32)
    test_pointwise.test_rope_of_halves_agrees_with_rotate_half(3, 80, 20, 33, torch.float32)
    test_pointwise.test_softcap_agrees_with_torch((3, 77), 30.0, torch.float32)
    test_pointwise.test_relu_squared_agrees_with_torch((3, 77), torch.float32)
    test_pointwise.test_xielu_agrees_with_its_definition((3, 77), torch.float32)
    for curve in test_pointwise.CURVES:
        test_pointwise.test_gates_agree_with_torch((3, 77), curve, torch.float32)
        test_pointwise.test_gates_are_right_at_their_limits(curve)


def check_experts() -> None:
    for name in ("F32", "Q4_K", "Q5_0"):
        weight = test_experts.random_experts(test_experts.block_type(name), 31, 256)
        for tokens, used in test_experts.BATCHES[:4]:
            chosen = test_experts.random_choices(tokens, used)
            x = test_experts.random_rows(tokens, used, 256)
            got = experts.expert_products(x, weight, chosen)
            assert test_experts.relative_error(got, x, weight, chosen) < 1e-6
    test_experts.test_a_choice_out_of_range_is_refused_before_any_read()
    for weighted in (True, False):
        test_experts.test_sums_may_also_be_scaled_by_expert(weighted)
    for rule in test_routing.RULES.values():
        for biased in (False, True):
            test_routing.test_routes_are_those_of_the_twin(rule, biased, 128, 8)
        test_routing.test_the_routes_of_a_row_do_not_depend_on_the_others(rule, 32, 4)


def check_recurrent_layers() -> None:
    rules = "tiled delta", "state space", "selective scan", "wkv7"
    for rule, shape in product(rules, ("groups", "odd_sizes")):
        test_recurrent_rules.test_steps_of_any_length_give_the_result_of_the_whole_sequence(
            rule, shape, "fast"
        )
    test_delta.test_extreme_gates_stay_finite("fast")
    for rule in (sequence_steps.Mamba2(), sequence_steps.Mamba()):
        test_state_space.test_extreme_steps_stay_finite(rule, "fast")

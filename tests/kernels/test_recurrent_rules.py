"""Recurrent rules and their convolutions, against `transformers` and each other."""

import pytest
import torch

from runtime.kernels.native import library
from tests.kernels.sequence_steps import PAGES, RULES, Sequences

every_rule = pytest.mark.parametrize("rule", RULES)
every_shape = pytest.mark.parametrize(
    "rule, shape", [(name, shape) for name, rule in RULES.items() for shape in rule.shapes]
)
every_kernel = pytest.mark.parametrize("kernel", ["fast", "twin"])


@every_shape
@every_kernel
def test_steps_of_any_length_give_the_result_of_the_whole_sequence(
    rule: str, shape: str, kernel: str
) -> None:
    sequences = Sequences(RULES[rule], shape, [150, 9, 3])
    cuts = [{0: 70}, {1: 1, 0: 1, 2: 3}, {0: 64, 1: 7}, {1: 1, 0: 1}, {0: 14}]
    found = sequences.steps(cuts, RULES[rule].kernels[kernel])
    assert found.keys() == {0, 1, 2}
    for number, got in found.items():
        for one, other in zip(got, sequences.expected(number), strict=True):
            sequences.assert_close(one, other)


@every_shape
def test_bits_do_not_depend_on_steps_or_other_sequences(rule: str, shape: str) -> None:
    if library() is None:
        pytest.skip("no C compiler here, so there is no fast path to test")
    together, apart = (Sequences(RULES[rule], shape, [41, 23]) for _ in range(2))
    fast = RULES[rule].kernels["fast"]
    whole = together.step({0: 41, 1: 23}, fast)[1]
    parts = apart.steps([{1: 5}, {1: 1}, {1: 17}], fast)[1]
    assert all(torch.equal(*pair) for pair in zip(whole, parts, strict=True))
    apart.step({0: 41}, fast)
    used = together.pages
    for one, other in ((together.stored.keys, apart.stored.keys),
                       (together.stored.values, apart.stored.values)):  # fmt: skip
        assert torch.equal(one[used], other[used])


@every_rule
@every_kernel
def test_a_new_sequence_ignores_the_state_in_its_page_and_changes_no_other_page(
    rule: str, kernel: str
) -> None:
    sequences = Sequences(RULES[rule], "groups", [5, 7])
    got = sequences.step({1: 7}, RULES[rule].kernels[kernel])[1]
    for one, other in zip(got, sequences.expected(1), strict=True):
        sequences.assert_close(one, other)
    untouched = [page for page in range(PAGES) if page != sequences.pages[1]]
    for stored in (sequences.stored.keys, sequences.stored.values):
        assert stored[untouched].isinf().all() and stored[sequences.pages[1]].isfinite().all()


@every_rule
@every_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_states_stay_in_float32_under_other_types(
    rule: str, kernel: str, dtype: torch.dtype
) -> None:
    sequences = Sequences(RULES[rule], "groups", [40], dtype)
    got = sequences.steps([{0: 30}, {0: 10}], RULES[rule].kernels[kernel])[0]
    for one, other in zip(got, sequences.expected(0), strict=True):
        assert one.dtype == dtype
        sequences.assert_close(one, other)

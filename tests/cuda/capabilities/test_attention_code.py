"""The code of every kernel of attention for every device: checks and prints the resources that it
needs. It takes minutes."""

import pytest

from tests.cuda.compiled import CAPABILITIES, compile_all
from tests.cuda.test_attention_code import assert_attention_code, assert_other_code
from tests.cuda.test_draws import assert_draw_code
from tests.cuda.test_selection import assert_selection_code
from tests.cuda.test_token_choice import assert_choice_code


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_attention_needs_no_stack_and_uses_tensor_cores(capability: int) -> None:
    code = compile_all("tests.cuda.capabilities.attention_specimens", capability)
    for name, kernel in code.items():
        print(capability, name, kernel)
    assert_attention_code(code, capability)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_other_kernels_need_no_stack_and_load_widely(capability: int) -> None:
    code = compile_all("tests.cuda.pointwise_specimens", capability)
    for name, kernel in code.items():
        print(capability, name, kernel)
    assert_other_code(code)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_selection_keeps_a_row_in_registers(capability: int) -> None:
    assert_selection_code(capability)
    assert_choice_code(capability)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_draws_keep_tokens_in_registers(capability: int) -> None:
    assert_draw_code(capability)

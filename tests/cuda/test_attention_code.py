"""The code of the kernels of attention, and of those between products, for one device."""

from collections.abc import Mapping

import pytest

from tests.cuda.compiled import Compiled, assert_dots_are_filled, compile_all

# Of blocks that may ask for it: A100, L4 and RTX 4090, H100, B200, RTX 5090.
SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
# Bytes of a thread that may be spilled: 8 or 16 by three kernels there, and 16, between splits, by
# those that compute rows in both ways.
SPILLED_BYTES = {120: 16}
PRODUCTS = ("HMMA", "HGMMA", "UTCHMMA")


def assert_attention_code(code: Mapping[str, Compiled], capability: int) -> None:
    """Tiles fit, products are those of tensor cores, loads have 16 bytes, hardly anything is
    spilled."""
    for name, kernel in code.items():
        if "576/512, " not in name:  # queries or a cache in float32 spill, but fit
            spilled = 16 if "long rows" in name else SPILLED_BYTES.get(capability, 0)
            assert kernel.stack <= spilled, (name, kernel)
        assert kernel.shared <= SHARED_BYTES[capability], (name, kernel)
        if not name.startswith("merge") and "float32" not in name:
            assert any(kernel.count(product) for product in PRODUCTS), (name, kernel.instructions)
        if "q8_0" not in name and "q4_0" not in name:
            wide = ("LDG.E.128", "LDGSTS.E.BYPASS.128", "LDG.E.ENL2.256")
            assert any(kernel.count(load) for load in wide), (name, kernel.instructions)


def test_attention_needs_no_stack_and_uses_tensor_cores() -> None:
    code = compile_all("tests.cuda.attention_specimens", 90)
    assert_attention_code(code, 90)
    assert code["prefill"].count("HGMMA") and code["decode"].count("LDGSTS.E.BYPASS.128")
    assert code["decode in parts"].registers <= 168  # three blocks on a multiprocessor
    assert code["decode"].registers <= 255  # two


def test_products_with_too_few_inner_elements_are_noticed() -> None:
    dot = (
        "%r = tt.dot %a, %b, %c : tensor<16x16xbf16, #ttg.dot_op<{opIdx = 0, parent = #mma, "
        "kWidth = WIDTH}>> * tensor<16x64xbf16, #ttg.dot_op<{opIdx = 1, parent = #mma, "
        "kWidth = WIDTH}>> -> tensor<16x64xf32, #mma>"
    )
    assert_dots_are_filled(dot.replace("WIDTH", "4"))
    with pytest.raises(AssertionError, match="16"):
        assert_dots_are_filled(dot.replace("WIDTH", "8"))


def test_other_kernels_need_no_stack_and_load_widely() -> None:
    assert_other_code(compile_all("tests.cuda.pointwise_specimens", 90))


def assert_other_code(code: Mapping[str, Compiled]) -> None:
    """16 bytes a load of many adjacent elements; states of sequences are in registers."""
    for name, kernel in code.items():
        assert kernel.stack == 0, (name, kernel)
        with_states = any(part in name for part in ("delta", "scan", "state", "wkv"))
        assert kernel.registers <= (168 if with_states else 64), (name, kernel)
        if not any(part in name for part in ("interleaved", "q4_0", "convolution", "of rows")):
            assert kernel.count("LDG.E.128"), (name, kernel.instructions)

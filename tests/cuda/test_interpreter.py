"""What the interpreter of these tests remembers is what Triton's makes each time."""

from itertools import product

import numpy as np
import pytest
import triton.language as tl
from triton.runtime.interpreter import TensorHandle, _get_np_dtype, interpreter_semantic

ELEMENTS = (tl.int1, tl.int32, tl.float16, tl.bfloat16, tl.pointer_type(tl.float32))


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_a_second_type_of_a_shape_has_what_the_first_one_has(element: tl.dtype) -> None:
    first, second, other = (tl.block_type(element, shape) for shape in ([64, 2], (64, 2), [2, 64]))
    assert first == second != other and first.element_ty is second.element_ty is element
    assert vars(first) == vars(second) and repr(second) == f"<['64', '2'], {element}>"
    assert second == tl.block_type(tl.int8, [tl.constexpr(64), 2]).with_element_ty(element)
    one, two = (tl.tensor(None, type) for type in (first, second))
    assert one.shape.values == two.shape.values == [tl.constexpr(64), tl.constexpr(2)]
    assert one.numel == 128 and one.dtype == element and one.type is first


@pytest.mark.parametrize(
    "shape, error", [([], TypeError), ([3], ValueError), ([2.0], TypeError)], ids=str
)
def test_an_invalid_shape_is_refused_also_if_an_equal_one_is_known(
    shape: list, error: type[Exception]
) -> None:
    tl.block_type(tl.int32, [2])
    for _ in range(2):
        with pytest.raises(error):
            tl.block_type(tl.int32, shape)


def tensor_of(element: tl.dtype, *shape: int) -> tl.tensor:
    data = np.arange(8, dtype=_get_np_dtype(element)).reshape(shape or -1)[: None if shape else 1]
    return tl.tensor(
        TensorHandle(data, element), tl.block_type(element, list(shape)) if shape else element
    )


@pytest.mark.parametrize("flags", [(), (True, True), (False, False, True, True)], ids=str)
@pytest.mark.parametrize("element", ELEMENTS[1:], ids=str)
def test_operands_that_are_known_are_those_that_triton_makes(element: tl.dtype, flags) -> None:
    """Also of equal numbers of other types; of 16 bits, they are divided in 32."""
    checked = type(interpreter_semantic).binary_op_type_checking_impl
    tensors = [tensor_of(element), tensor_of(element, 8), tensor_of(element, 4, 2)]
    others = [2, 2.0, True, 1, 1.0, 0.0, 0, tensor_of(tl.int32), *tensors]
    pairs = [*product(tensors, others), *product(others, tensors)]
    for lhs, rhs in pairs * 2:  # known the second time
        try:
            expected = checked.__wrapped__(interpreter_semantic, lhs, rhs, *flags)
        except Exception as error:
            with pytest.raises(type(error)):
                checked(interpreter_semantic, lhs, rhs, *flags)
            continue
        for one, other in zip(
            checked(interpreter_semantic, lhs, rhs, *flags), expected, strict=True
        ):
            assert one.type == other.type and one.shape.values == other.shape.values
            assert one.handle.dtype == other.handle.dtype
            assert one.handle.data.dtype == other.handle.data.dtype
            assert np.array_equal(one.handle.data, other.handle.data)


def test_a_handle_with_larger_numbers_than_its_type_is_refused() -> None:
    for element in (tl.float16, tl.int1):
        with pytest.raises(ValueError, match="exceeds"):
            TensorHandle(np.zeros(2, dtype=np.float32), element)
    assert TensorHandle(np.zeros(2, dtype=bool), tl.int1).attr == {}

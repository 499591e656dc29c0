"""What the interpreter of these tests remembers is what Triton's makes each time."""

import pytest
import triton.language as tl

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

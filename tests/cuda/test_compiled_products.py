"""The kernels for products, compiled for an H100: limits of registers, and required
instructions."""

from tests.cuda import product_specimens
from tests.cuda.compiled import compile_all


def test_kernels_for_products_compile_within_their_ceilings() -> None:
    found = compile_all(product_specimens.__name__, 90)
    assert found.keys() == product_specimens.specimens(90).keys()
    for name, compiled in found.items():
        product_specimens.check(name, compiled)

"""The kernels for products for every block type and kind of device: make test-cuda."""

import pytest

from tests.cuda.capabilities import specimens
from tests.cuda.compiled import CAPABILITIES, compile_all
from tests.cuda.product_specimens import check


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_all_kernels_compile_within_their_ceilings(capability: int) -> None:
    found = compile_all(specimens.__name__, capability)
    assert found.keys() == specimens.specimens(capability).keys()
    for name, compiled in found.items():
        check(name, compiled)

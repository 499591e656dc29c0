"""The kernels for products, for every block type."""

from runtime.kernels.triton.groups import FORMS
from tests.cuda.compiled import Specimen
from tests.cuda.product_specimens import specimens_of


def specimens(capability: int) -> dict[str, Specimen]:
    return specimens_of(FORMS, capability)

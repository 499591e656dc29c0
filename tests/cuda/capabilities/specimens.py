"""The kernels for products, for every block type."""

from runtime.kernels.triton.groups import FORMS
from tests.cuda.product_specimens import specimens

SPECIMENS = specimens(FORMS)

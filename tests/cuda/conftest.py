"""Kernels of these tests run in Triton's interpreter, without what it computes in vain."""

from importlib.util import find_spec

if find_spec("triton") is not None:
    from tests.cuda.interpreter import leave_out_what_has_no_effect

    leave_out_what_has_no_effect()

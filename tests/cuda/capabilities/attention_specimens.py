"""Kernels of paged attention for all head sizes and types of caches."""

from tests.cuda.attention_specimens import SHAPES, decode, merge, prefill
from tests.cuda.compiled import Specimen


def specimens(capability: int) -> dict[str, Specimen]:
    parts = ("8B", "576/512")
    return {
        **{f"decode {name}": decode(shape) for name, shape in SHAPES.items()},
        **{f"decode in parts {name}": decode(SHAPES[name], whole=False) for name in parts},
        **{f"merge {name}": merge(SHAPES[name]) for name in parts},
        **{f"prefill {name}": prefill(shape) for name, shape in SHAPES.items()},
    }

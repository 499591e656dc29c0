"""Kernels of paged attention for all head sizes and types of caches."""

from tests.cuda.attention_specimens import decode, merge, prefill, shapes
from tests.cuda.compiled import Specimen


def specimens(capability: int) -> dict[str, Specimen]:
    found, parts = shapes(capability), ("8B", "8B, q8_0", "512", "576/512")
    return {
        **{f"decode {name}": decode(shape) for name, shape in found.items()},
        **{f"decode in parts {name}": decode(found[name], whole=0) for name in parts},
        **{
            f"decode long rows in parts {name}": decode(shape, whole=1)
            for name, shape in found.items()
            if shape.has_both_ways
        },
        **{f"merge {name}": merge(found[name]) for name in parts},
        **{f"merge and round {name}": merge(found[name], planes=2) for name in parts},
        **{f"prefill {name}": prefill(shape) for name, shape in found.items()},
    }

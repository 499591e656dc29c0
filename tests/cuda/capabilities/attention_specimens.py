"""Kernels of paged attention for all head sizes and types of caches."""

from tests.cuda.attention_specimens import decode, merge, prefill, shapes
from tests.cuda.compiled import Specimen


def specimens(capability: int) -> dict[str, Specimen]:
    found, parts = shapes(capability), ("8B", "576/512")
    return {
        **{f"decode {name}": decode(shape) for name, shape in found.items()},
        **{f"decode in parts {name}": decode(found[name], whole=False) for name in parts},
        **{f"merge {name}": merge(found[name]) for name in parts},
        **{f"merge and round {name}": merge(found[name], planes=2) for name in parts},
        **{f"prefill {name}": prefill(shape) for name, shape in found.items()},
    }

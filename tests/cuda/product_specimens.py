"""Kernels for products with weights, as they are launched for matrices of a model."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from runtime.kernels.pointwise import curve_of, silu_mul
from runtime.kernels.triton import (
    bundles,
    dequantize,
    fragments,
    rounded,
    tiles,
    vector,
    wide_tiles,
)
from runtime.kernels.triton.groups import FORMS
from tests.cuda.compiled import Compiled, Specimen

_COUNTS = ("rows", "outs", "groups", "row_stride")
_MULTIPLES = ("row_stride", "expert_stride", "x_stride", "groups", "outs")
_SILU = curve_of(silu_mul)
_PLAIN = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def specimens_of(types: Iterable[str], capability: int) -> dict[str, Specimen]:
    """By name; one that ends in the name of a type is for weights of this type."""
    (narrow, wide), floats = tiles.tilings(torch.bfloat16), tiles.tilings(torch.float32)[-1]
    found = {
        "round": _rounding(1),
        "round in two planes": _rounding(2),
        "sum": Specimen(
            tiles.sum_kernel,
            {"parts": "*fp32", "result": "*bf16", "count": "i32"},
            {"SPLITS": 4, "SIZE": 512},
        ),
        "count": Specimen(
            bundles.count_kernel,
            {"chosen": "*i64", "counts": "*i32", "pairs": "i32"},
            {"READ": 1024},
        ),
        "bundle": Specimen(
            bundles.bundle_kernel,
            {"chosen": "*i64", "counts": "*i32", "bundle_experts": "*i32", "bundle_pairs": "*i32"}
            | dict.fromkeys(("pairs", "experts", "bundles"), "i32"),
            {"SIZE": 64, "EXPERTS": 128, "READ": 1024},
        ),
        "arrange": Specimen(
            fragments.arrange_kernel,
            {"x": "*bf16", "result": "*bf16"}
            | dict.fromkeys(("rows", "groups", "blocks", "row_stride"), "i32"),
            {"pairs": None, "share": 1},
            ("row_stride",),
        ),
        "arrange pairs": Specimen(
            fragments.arrange_kernel,
            {"x": "*bf16", "pairs": "*i32", "result": "*bf16"}
            | dict.fromkeys(("rows", "groups", "blocks", "row_stride", "share"), "i32"),
            {},
            ("row_stride",),
        ),
        "arrange rows": Specimen(
            wide_tiles.arrange_rows_kernel,
            {"x": "*bf16", "result": "*bf16"}
            | dict.fromkeys(("elements", "length", "row_stride"), "i32"),
            {"SIZE": 1024},
            ("elements", "length", "row_stride"),
        ),
        "dequantize chosen rows of Q4_K": _dequantizing("Q4_K", chosen=True),
    }
    for type, dtype in _PLAIN.items():
        for tiling in tiles.tilings(torch.bfloat16, dtype):
            found[f"tile of {tiling.rows} {type}"] = _tile(type, "bf16", tiling, result="fp32")
            found[f"gated tile of {tiling.rows} {type}"] = _tile(type, "bf16", tiling, curve=_SILU)
        found[f"tile of experts {type}"] = _tile(type, "bf16", narrow, experts=True)
        if type == "fp32" or capability != 100:
            found[f"tile of {floats.rows} floats {type}"] = _tile(type, "fp32", floats)
    for type in types:
        found[f"dequantize {type}"] = _dequantizing(type)
        for columns in (1, 8):
            found[f"vector of {columns} {type}"] = _vector(type, columns)
            found[f"gated vector of {columns} {type}"] = _vector(type, columns, curve=_SILU)
        found[f"vector of experts {type}"] = _vector(type, 1, experts=True)
        # Warps as of matrices of an 8B model: of queries and keys, and of gates.
        for rows in (16, 32, fragments.MOST_ROWS):
            found[f"fragments of {rows} {type}"] = _fragments(type, rows, warps=8)
        found[f"gated fragments of 16 {type}"] = _fragments(type, 16, warps=2, curve=_SILU)
        for rows in (8, 16):
            found[f"fragments of {rows} pairs {type}"] = _fragments(type, rows, experts=True)
        found[f"gated tile of {wide.rows} {type}"] = _tile(type, "bf16", wide, curve=_SILU)
        for tiling in (narrow, wide):
            found[f"tile of {tiling.rows} {type}"] = _tile(type, "bf16", tiling)
        found[f"tile of experts {type}"] = _tile(type, "bf16", narrow, experts=True)
        if capability == 90:  # that of Hopper
            found |= _wide_tiles(type)
        found[f"tile of {floats.rows} floats {type}"] = _tile(type, "fp32", floats)
    return found


def _rounding(planes: int) -> Specimen:
    pointers = {"x": "*bf16", "planes": "*i8", "scales": "*fp32", "sums": "*i32"}
    constants = {"factors": None, "SHARE": 1, "PLANES": planes, "GROUPS": rounded.GROUPS}
    integers = ("count", "groups", "row_stride")
    types = pointers | dict.fromkeys(integers, "i32")
    return Specimen(rounded.round_kernel, types, constants, integers[1:], 1, fused=False)


def _grid(type: str) -> tuple[dict[str, str], dict[str, object]]:
    return ({}, {"grid": None}) if FORMS[type].grid is None else ({"grid": "*i32"}, {})


def _dequantizing(type: str, *, chosen: bool = False) -> Specimen:
    pointer, absent = _grid(type)
    integers = ("count", "groups", "row_stride")
    types = {"data": "*u8", "out": "*bf16"} | pointer | dict.fromkeys(integers, "i32")
    constants = {"TYPE": type, "GROUPS": dequantize.GROUPS} | absent
    if chosen:
        types["ids"] = "*i64"
    else:
        constants["ids"] = None
    return Specimen(dequantize.dequantize_kernel, types, constants, integers[1:])


def _vector(
    type: str, columns: int, *, experts: bool = False, curve: int | None = None
) -> Specimen:
    pointer, absent = _grid(type)
    types = {"planes": "*i8", "scales": "*fp32", "sums": "*i32", "data": "*u8", "result": "*bf16"}
    types |= pointer | dict.fromkeys(_COUNTS, "i32")
    warps = 4 if experts else 1  # experts are small matrices, see `vector.warps_of`
    constants = {"TYPE": type, "PLANES": 2, "COLUMNS": columns, "GROUPS": 32 * warps} | absent
    constants |= {"OUTS": vector.OUTS[columns], "CURVE": curve}
    if experts:
        types |= {"chosen": "*i64", "bias": "*fp32", "expert_stride": "i32", "share": "i32"}
    else:
        constants |= {"chosen": None, "bias": None, "expert_stride": 1, "share": 1}
    if columns == 1 and not experts:
        del types["rows"]
        constants["rows"] = 1  # Triton makes constants of arguments that are 1
    return Specimen(
        vector.vector_kernel, types, constants, _MULTIPLES, warps, 1, fused=False,
        most_registers=vector.MOST_EXPERT_REGISTERS if experts else vector.MOST_REGISTERS[columns],
        reads_early=not experts,
    )  # fmt: skip


def _fragments(
    type: str, rows: int, *, warps: int = 4, experts: bool = False, curve: int | None = None
) -> Specimen:
    pointer, absent = _grid(type)
    types = {"fragments": "*bf16", "data": "*u8", "result": "*bf16"}
    types |= pointer | dict.fromkeys((*_COUNTS, "blocks"), "i32")
    constants = {"TYPE": type, "ROWS": rows, "OUTS": fragments.OUTS, "CURVE": curve}
    constants["WARPS"] = warps
    if experts:
        types |= {"experts": "*i32", "pairs": "*i32", "factors": "*fp32", "bias": "*fp32"}
        types |= {"expert_stride": "i32"}
    else:
        constants |= dict.fromkeys(("experts", "pairs", "factors", "bias"))
        constants |= {"expert_stride": 1}
    multiples = (*_MULTIPLES, "blocks")
    return Specimen(
        fragments.fragment_kernel, types, constants | absent, multiples, warps, 1,
        most_registers=fragments.MOST_REGISTERS[rows], reads_early=not experts,
    )  # fmt: skip


def _tile(
    type: str,
    number: str,
    tiling: tiles.Tiling,
    *,
    experts: bool = False,
    curve: int | None = None,
    result: str | None = None,
) -> Specimen:
    """`type`: of blocks or, as Triton names it, of plain numbers. `result`: by default `number`."""
    plain = type not in FORMS
    pointer, absent = ({}, {"grid": None}) if plain else _grid(type)
    data = f"*{type}" if plain else "*u8"
    types = {"x": f"*{number}", "data": data, "result": f"*{result or number}"}
    types |= pointer | dict.fromkeys((*_COUNTS, "x_stride"), "i32")
    constants = {
        "TYPE": tiles.PLAIN.value if plain else type,
        "ROWS": tiling.rows,
        "OUTS": tiling.outs,
        "SPLITS": 1,
        "CURVE": curve,
    } | absent
    constants["GROUPS"] = tiling.groups
    if experts:
        types |= {"experts": "*i32", "pairs": "*i32", "factors": "*fp32", "bias": "*fp32"}
        types |= {"expert_stride": "i32", "share": "i32"}
    else:
        constants |= dict.fromkeys(("experts", "pairs", "factors", "bias"))
        constants |= {"expert_stride": 1, "share": 1}
    return Specimen(tiles.tile_kernel, types, constants, _MULTIPLES, tiling.warps, tiling.stages)


def _wide_tiles(type: str) -> dict[str, Specimen]:
    """In all forms that are launched, since their registers are allocated anew in each."""
    found = {}
    for tiling in wide_tiles.TILINGS:
        name = f"wide tile of {tiling.rows}"
        found |= {
            f"{name} {type}": _wide_tile(type, tiling),
            f"{name} in parts {type}": _wide_tile(type, tiling, result="*fp32"),
            f"gated {name} {type}": _wide_tile(type, tiling, curve=_SILU),
        }
    strides = ("row_stride", "x_stride")
    return found | {
        f"{name} of float16 {type}": _wide_tile(type, tiling, x="*fp16", result="*fp16"),
        f"{name} of an odd size {type}": _wide_tile(type, tiling, multiples=strides),
    }


def _wide_tile(
    type: str,
    tiling: tiles.Tiling,
    *,
    x: str = "*bf16",
    result: str = "*bf16",
    curve: int | None = None,
    multiples: tuple[str, ...] = _MULTIPLES,
) -> Specimen:
    """Its result are float32 sums if programs divide the inner elements."""
    pointer, absent = _grid(type)
    types = {"x": x, "data": "*u8", "result": result} | pointer
    types |= dict.fromkeys((*_COUNTS, "x_stride"), "i32")
    constants = {"TYPE": type, "ROWS": tiling.rows, "OUTS": tiling.outs, "CURVE": curve} | absent
    if result == "*fp32":
        types["splits"] = "i32"
    else:
        constants["splits"] = 1
    return Specimen(
        wide_tiles.wide_tile_kernel, types, constants, multiples, tiling.warps, tiling.stages,
        reads_early=True,
    )  # fmt: skip


@dataclass(frozen=True)
class Ceiling:
    """registers: of a thread; shared: bytes of a program; per_weight: instructions of a thread in
    its loop for each of the weights that it reads."""

    registers: int
    shared: int
    per_weight: float


# By the beginning of a name. 99 KiB is what a program may have on sm_89, 227 KiB on sm_90.
CEILINGS = {
    "dequantize": Ceiling(64, 4 << 10, 0),
    "vector of 1": Ceiling(96, 2 << 10, 8),
    "vector of experts": Ceiling(168, 2 << 10, 8),
    "vector of 8": Ceiling(255, 2 << 10, 15),
    "fragments of 8 pairs": Ceiling(128, 4 << 10, 11),
    "fragments of 16": Ceiling(168, 8 << 10, 11),
    "fragments of 32": Ceiling(168, 16 << 10, 12),
    "fragments of 64": Ceiling(255, 32 << 10, 12),
    "tile of 64": Ceiling(255, 99 << 10, 26),
    "tile of 128": Ceiling(255, 99 << 10, 26),
    "tile of 32 floats": Ceiling(255, 99 << 10, 50),
    "tile of experts": Ceiling(255, 99 << 10, 26),
    "wide tile of 128": Ceiling(224, 99 << 10, 12),
    "wide tile of 256": Ceiling(255, 200 << 10, 12),
}
# Through shared memory or between threads.
_MOVES = ("LDS", "STS", "SHFL", "MOVM")
_TENSOR_CORES = ("HMMA", "HGMMA", "UTCHMMA", "UTCMMA")
# Their widest planes have 4 or 8 bytes for 32 weights.
_NARROW = "Q2_K Q3_K TQ1_0 TQ2_0 IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S".split()


def check(name: str, found: Compiled) -> None:
    """What is asserted of a compiled kernel."""
    assert found.stack == 0, (name, found)
    name = name.removeprefix("gated ")
    kind = next((kind for kind in CEILINGS if name.startswith(kind)), None)
    if kind is None:
        assert found.registers <= 128 and found.shared <= 8 << 10, (name, found)
        return
    ceiling = CEILINGS[kind]
    assert found.registers <= ceiling.registers, (name, found)
    assert found.shared <= ceiling.shared, (name, found)
    assert per_weight(name, found) <= ceiling.per_weight, (name, found)
    type = name.split()[-1]
    if kind.startswith("vector"):
        assert found.count("IDP.4A") >= 16 * 2, (name, found.instructions)
        assert found.count("LDG.E.128"), (name, found.instructions)  # of activations at least
    if kind.startswith(("fragments", "wide")):
        moves = (*_MOVES, "BAR") if kind.startswith("fragments") else _MOVES
        moved = [each for each in found.looped if each.startswith(moves)]
        assert not moved, (name, moved)
    if kind.startswith("wide"):
        assert found.count("HGMMA") == 8, (name, found.instructions)  # of a block, in the loop
    elif kind.startswith(("fragments", "tile")):
        assert any(map(found.count, _TENSOR_CORES)), (name, found.instructions)
    elif type not in _NARROW:
        assert found.count("LDG.E.128"), (name, found.instructions)


def per_weight(name: str, found: Compiled) -> float:
    """Instructions in the loop of a thread for each of its weights; 0 without a loop."""
    if name.startswith("vector"):
        if name.startswith("vector of 8"):
            return found.loop / (32 * vector.OUTS[8])
        return found.loop / (2 * 32 * vector.OUTS[1])  # of two groups
    if name.startswith("fragments"):
        return found.loop / (2 * 64)  # of two steps with two groups
    if name.startswith("wide"):
        return found.loop / 64  # of two groups
    # of a thread: 64 outputs of 64 inputs for 128 threads, or 128 of them for 256
    return found.loop / 32


def specimens(capability: int) -> dict[str, Specimen]:
    """Most kernels for one type, and those that differ most for a table and a grid, and some for
    plain numbers. The others are compiled by make test-cuda."""
    others = ("fragments of 32", "gated wide tile of 128", "wide tile of 128 in parts")
    plain = ("tile of 128 fp16", "gated tile of 64 bf16", "tile of experts bf16")
    found = specimens_of(["Q4_K"], capability)
    chosen = (name for name in found if name in plain or not name.endswith(tuple(_PLAIN)))
    return {name: found[name] for name in chosen if not name.startswith(others)} | {
        name: specimen
        for name, specimen in specimens_of(["MXFP4", "IQ2_XS"], capability).items()
        if name.startswith(("dequantize", "vector of 1"))
    }

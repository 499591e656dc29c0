"""Recipes with llama.cpp's names: the block type of each tensor.

A recipe has a base type and rules for tensors that get more bits; the first rule that applies
counts. Norms, routers and other small tensors are never quantised.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod
from types import MappingProxyType

from runtime.errors import ConfigurationError
from runtime.quant.block_types import block_type


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a model that rules depend on.

    kv_sharing: query heads per key head; tied: token_embd is also the output matrix.
    without_values, without_down: layers that have no value matrix or no `ffn_down`.
    """

    layers: int
    experts: int = 0
    kv_sharing: int = 1
    tied: bool = False
    without_values: frozenset[int] = frozenset()
    without_down: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class CountedPlace:
    """The index of a matrix among `count` of its kind, by which llama.cpp decides.

    Value matrices are counted; feed-forward matrices have the index among theirs, or with experts
    the number of the layer, of all layers.
    """

    index: int
    count: int


@dataclass(frozen=True, slots=True)
class TypeRule:
    """`part`: prefixes of names in a layer, as `attn_v` in `blk.7.attn_v.weight`."""

    part: str | tuple[str, ...]
    type: str
    applies: Callable[[CountedPlace, Facts], bool] = lambda place, facts: True


@dataclass(frozen=True, slots=True)
class Recipe:
    """`file_type`: the value of `general.file_type`; `output`: the type of the output matrix."""

    file_type: int
    base: str
    rules: tuple[TypeRule, ...] = ()
    output: str = "Q6_K"

    @property
    def plain(self) -> bool:
        """Whether weights are stored as numbers without blocks."""
        return block_type(self.base).block_elements == 1


def facts_of_names(
    names: Iterable[str], *, layers: int, experts: int = 0, kv_sharing: int = 1
) -> Facts:
    """The facts of a file with tensors of these names."""
    names = set(names)
    matches = [match for match in map(_LAYER.fullmatch, names) if match is not None]

    def without(part: str | tuple[str, ...]) -> frozenset[int]:
        having = {int(match["number"]) for match in matches if match["part"].startswith(part)}
        return frozenset(range(layers)) - having

    return Facts(
        layers=layers,
        experts=experts,
        kv_sharing=kv_sharing,
        tied="output.weight" not in names,
        without_values=without(_VALUES),
        without_down=without(_DOWN),
    )


def tensor_type(recipe: str, name: str, shape: tuple[int, ...], facts: Facts) -> str:
    """The block type's name; `shape` in torch order. ConfigurationError for an unknown recipe."""
    chosen = recipe_named(recipe)
    if prod(shape[:-1]) == 1 or _FULL.search(name) or not name.endswith(".weight"):
        return "F32"
    if _PATCHES.search(name):
        return "F32" if chosen.base in ("F32", "BF16") else "F16"
    if chosen.plain:
        return chosen.base
    if _HALF.search(name):
        return "F16"
    return _fitting(_target_type(chosen, name, facts), shape[-1])


def recipe_named(name: str) -> Recipe:
    """The recipe of that name; ConfigurationError suggests the nearest one and lists all."""
    recipe = RECIPES.get(name.lower())
    if recipe is not None:
        return recipe
    near = get_close_matches(name.lower(), RECIPES, n=1)
    hint = f" Did you mean `{near[0]}`?" if near else ""
    raise ConfigurationError(f"There is no recipe `{name}`.{hint} Known are {', '.join(RECIPES)}.")


def file_type(recipe: str, kept: Iterable[str | None] = ()) -> int:
    """The value of `general.file_type`. `kept`: for each tensor the type of the stored blocks that
    it keeps, or None."""
    counts = Counter(type for type in kept if type is not None)
    if counts:
        return _FILE_TYPES_OF_BLOCKS[counts.most_common(1)[0][0]]
    return recipe_named(recipe).file_type


def _target_type(recipe: Recipe, name: str, facts: Facts) -> str:
    if name == "output.weight" or (facts.tied and name in _EMBEDDINGS):
        return recipe.output
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return recipe.base
    place = _place(layer["part"], int(layer["number"]), facts)
    for rule in (*_EIGHT_EXPERTS, *recipe.rules):
        if layer["part"].startswith(rule.part) and rule.applies(place, facts):
            return rule.type
    return recipe.base


def _place(part: str, layer: int, facts: Facts) -> CountedPlace:
    if part.startswith(_VALUES):
        missing = facts.without_values
        return CountedPlace(_index(layer, missing), facts.layers - len(missing))
    if part.startswith(_DOWN) and facts.experts <= 1:
        return CountedPlace(_index(layer, facts.without_down), facts.layers)
    return CountedPlace(layer, facts.layers)


def _index(layer: int, missing: frozenset[int]) -> int:
    """The index of a layer among all but the missing ones."""
    return layer - sum(other < layer for other in missing)


def _fitting(wanted: str, row: int) -> str:
    """The type, or the best substitute whose blocks divide the row."""
    while row % block_type(wanted).block_elements:
        wanted = _SUBSTITUTES.get(wanted, "F16")
    return wanted


def _more_bits(place: CountedPlace, facts: Facts) -> bool:
    """The first and the last eighth, and every third one between."""
    eighth = place.count // 8
    last = place.index >= 7 * place.count // 8
    return place.index < eighth or last or (place.index - eighth) % 3 == 2


def _first_eighth(place: CountedPlace, facts: Facts) -> bool:
    return place.index < place.count // 8


def _first_sixteenth(place: CountedPlace, facts: Facts) -> bool:
    return place.index < place.count // 16


def _first_two(place: CountedPlace, facts: Facts) -> bool:
    return place.index < 2


def _first_four(place: CountedPlace, facts: Facts) -> bool:
    return place.index < 4


def _shared_by_four(place: CountedPlace, facts: Facts) -> bool:
    return facts.kv_sharing >= 4


def _eighty_layers(place: CountedPlace, facts: Facts) -> bool:
    """For models of 70 billion weights, whose value matrices are small and sensitive."""
    return facts.layers == 80 and facts.kv_sharing > 1


def _eight_experts(place: CountedPlace, facts: Facts) -> bool:
    """For models such as Mixtral, whose attention is small compared with the experts."""
    return facts.experts == 8


_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
_LAYER = re.compile(r"blk\.(?P<number>\d+)\.(?P<part>.+)")
_PATCHES = re.compile(r"\.patch_embd")
# Norms, routers, positions, convolutions of state space layers: small and sensitive.
_FULL = re.compile(
    r"_norm\.weight$|ffn_gate_inp|position_embd|token_types|ssm_conv1d|shortconv\.conv\.|\.rel_pos"
    r"|attn_rel_b|time_mix_(first|w[12]|[va][0-2]|g[12]|decay_w[12]|lerp_fused)\."
)
# Vision and audio encoders with their projectors, and small matrices of Gemma 3n.
_HALF = re.compile(r"^(v|a|mm|s)\.|altup|laurel|per_layer_model_proj")
_SUBSTITUTES = {
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}
# Value matrices, alone or joined with queries and keys.
_VALUES = ("attn_v.", "attn_qkv.", "attn_kv_b.")
_DOWN = "ffn_down"
_EIGHT_EXPERTS = (
    TypeRule(_VALUES, "Q8_0", _eight_experts),
    TypeRule("attn_k.", "Q8_0", _eight_experts),
)
_EIGHT_EXPERTS_OUTPUT = TypeRule("attn_output.", "Q5_K", _eight_experts)
_VALUES_OF_EIGHTY_LAYERS = TypeRule(_VALUES, "Q5_K", _eighty_layers)
_FILE_TYPES_OF_BLOCKS = {"Q4_0": 2, "Q8_0": 7, "MXFP4": 38, "NVFP4": 39}
_EXPERTS = ("ffn_gate_exps.", "ffn_up_exps.", "ffn_down_exps.", "ffn_gate_up_exps.")

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "f32": Recipe(0, "F32"),
        "f16": Recipe(1, "F16"),
        "bf16": Recipe(32, "BF16"),
        "q8_0": Recipe(7, "Q8_0", output="Q8_0"),
        "q4_0": Recipe(2, "Q4_0"),
        "q4_1": Recipe(3, "Q4_1"),
        "q5_0": Recipe(8, "Q5_0"),
        "q5_1": Recipe(9, "Q5_1"),
        "q2_k": Recipe(
            10,
            "Q2_K",
            (
                _VALUES_OF_EIGHTY_LAYERS,
                TypeRule(_VALUES, "Q4_K", _shared_by_four),
                TypeRule(_VALUES, "Q3_K"),
                TypeRule(_DOWN, "Q3_K"),
                _EIGHT_EXPERTS_OUTPUT,
                TypeRule("attn_output.", "Q3_K"),
            ),
        ),
        "q3_k_s": Recipe(11, "Q3_K", (_VALUES_OF_EIGHTY_LAYERS, _EIGHT_EXPERTS_OUTPUT)),
        "q3_k_m": Recipe(
            12,
            "Q3_K",
            (
                _VALUES_OF_EIGHTY_LAYERS,
                TypeRule(_VALUES, "Q5_K", _first_two),
                TypeRule(_VALUES, "Q4_K"),
                TypeRule(_DOWN, "Q5_K", _first_sixteenth),
                TypeRule(_DOWN, "Q4_K"),
                _EIGHT_EXPERTS_OUTPUT,
                TypeRule("attn_output.", "Q4_K"),
            ),
        ),
        "q3_k_l": Recipe(
            13,
            "Q3_K",
            (
                TypeRule(_VALUES, "Q5_K"),
                TypeRule(_DOWN, "Q5_K"),
                TypeRule("attn_output.", "Q3_K", _eight_experts),
                TypeRule("attn_output.", "Q5_K"),
            ),
        ),
        "q4_k_s": Recipe(
            14,
            "Q4_K",
            (
                _VALUES_OF_EIGHTY_LAYERS,
                TypeRule(_VALUES, "Q5_K", _first_four),
                TypeRule(_DOWN, "Q5_K", _first_eighth),
                _EIGHT_EXPERTS_OUTPUT,
            ),
        ),
        "q4_k_m": Recipe(
            15,
            "Q4_K",
            (
                TypeRule(_VALUES, "Q6_K", _more_bits),
                _VALUES_OF_EIGHTY_LAYERS,
                TypeRule(_DOWN, "Q6_K", _more_bits),
                _EIGHT_EXPERTS_OUTPUT,
            ),
        ),
        "q5_k_s": Recipe(16, "Q5_K"),
        "q5_k_m": Recipe(
            17,
            "Q5_K",
            (
                TypeRule(_VALUES, "Q6_K", _more_bits),
                TypeRule(_DOWN, "Q6_K", _more_bits),
            ),
        ),
        "q6_k": Recipe(18, "Q6_K"),
        "iq4_nl": Recipe(
            25,
            "IQ4_NL",
            (
                TypeRule(_VALUES, "Q5_K", _shared_by_four),
                TypeRule(_DOWN, "Q5_K", _first_eighth),
                _EIGHT_EXPERTS_OUTPUT,
            ),
        ),
        "mxfp4": Recipe(38, "Q8_0", tuple(TypeRule(part, "MXFP4") for part in _EXPERTS), "Q8_0"),
    }
)

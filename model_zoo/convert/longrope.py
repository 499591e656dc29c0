"""Keys and factors of LongRoPE (Ding et al., "LongRoPE"), for conversion tables."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from model_zoo.convert import decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import Computed, Key
from runtime.errors import UnsupportedModelError

# The names that settings use for this scaling; in those of Phi 3, also the third.
KINDS = ("longrope", "su")
PHI = (*KINDS, "yarn")
# Without this key, llama.cpp ignores the factors in files of some architectures.
TYPE = Key("rope.scaling.type", lambda c: "longrope" if _is_long(c, KINDS) else None)


def keys(kinds: Sequence[str] = KINDS) -> tuple[Key, Key]:
    """The original context and the factor of cosines and sines, if positions are scaled so.

    kinds: the names that the family's settings use for this scaling.
    """
    return (
        Key(
            "rope.scaling.original_context_length",
            lambda c: _original_context(c) if _is_long(c, kinds) else None,
        ),
        Key(
            "rope.scaling.attn_factor",
            lambda c: _attention_factor(c) if _is_long(c, kinds) else None,
        ),
    )


def factors(kinds: Sequence[str] = KINDS) -> tuple[Computed, Computed]:
    """Divisors of the frequencies for contexts above and within the original one."""
    return _factors("long", kinds), _factors("short", kinds)


def _is_long(config: Configuration, kinds: Sequence[str]) -> bool:
    return config.rope()["rope_type"] in kinds


def _original_context(config: Configuration) -> int:
    """Among the rope parameters or, as in Phi 3, beside them."""
    key = "original_max_position_embeddings"
    stated = config.rope().get(key)
    return config.require_size(key) if stated is None else int(stated)


def _attention_factor(config: Configuration) -> float:
    """The factor of cosines and sines: as stated, else as in the paper."""
    rope = config.rope()
    of_short, of_long = (rope.get(f"{name}_mscale") for name in ("short", "long"))
    if of_short != of_long:
        raise UnsupportedModelError(
            f"{config.path}: `short_mscale` is {of_short} and `long_mscale` {of_long}; files state "
            "one value for both."
        )
    stated = rope.get("attention_factor", of_long)
    if stated is not None:
        return float(stated)
    original = _original_context(config)
    growth = config.require_size("max_position_embeddings") / original
    return math.sqrt(1 + math.log(growth) / math.log(original)) if growth > 1 else 1.0


def _factors(name: str, kinds: Sequence[str]) -> Computed:
    def make(config: Configuration) -> Tensor | None:
        if not _is_long(config, kinds):
            return None
        factors = torch.tensor(config.rope().get(f"{name}_factor") or (), dtype=torch.float32)
        if len(factors) != decoders.rotated_size(config) // 2:
            raise config.error(f"has {len(factors)} numbers as `{name}_factor`")
        return factors

    return Computed(f"rope_factors_{name}.weight", make)

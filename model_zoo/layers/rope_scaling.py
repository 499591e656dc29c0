"""Reads rotary embeddings from files: base, scaling for long contexts, factors."""

from math import ceil, floor, log, pi, sqrt

import torch
from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.gguf.tensors import derived
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.text_sizes import TextSizes
from runtime.errors import UnsupportedModelError

# The default base of Llama, Gemma 2, Phi 3 and all vision models in `transformers`. Other families
# have their own default, or none if their models differ, such as Qwen's.
DEFAULT_BASE = 10000.0
_KINDS = ("none", "linear", "yarn", "longrope")
_UNSCALED = ("", "default")  # what converters of Ollama write for settings without scaling


def read_rotary(
    w: TensorScope,
    sizes: TextSizes,
    pairs: Pairs,
    *,
    dim: int | None = None,
    base: float | None = None,
    default_base: float | None = None,
    kind: str | None = None,
    original_context: int | None = None,
    truncate: bool = True,
    factors_of: int | None = None,
) -> Rotary:
    """The rotary embedding that the keys `rope.*` and the tensors `rope_*` describe.

    dim: rotated dimensions, overrides `rope.dimension_count`. base: overrides `rope.freq_base`,
    which the file must state if there is no `default_base` either. kind: kind of scaling if the
    file states none. original_context: original context of YaRN and LongRoPE if the file states
    none; None: YaRN's is then the whole context, and LongRoPE's must be stated. truncate: whether
    YaRN's range is widened to whole frequencies. factors_of: number of rotated dimensions for whose
    frequencies `rope_freqs` has factors, a multiple of `dim`; None: of `dim` itself.

    Raises ModelFileError for missing or impossible values, UnsupportedModelError for other kinds of
    scaling.
    """
    metadata = sizes.metadata
    dim = dim or _rotated(metadata, sizes.key_dim)
    if dim % 2:
        raise metadata.error("attention.key_length", f"is {dim}; rotated heads need an even size")
    base = base or metadata.get_positive("rope.freq_base", default_base)
    frequencies = plain_frequencies(dim, base)
    magnitude = 1.0
    match _kind(w, metadata, kind):
        case "linear":
            frequencies = frequencies / _linear_factor(metadata)
        case "yarn":
            original = _original_context(metadata, original_context)
            frequencies, magnitude = _yarn(metadata, dim, base, original, truncate)
        case "longrope":
            factors, magnitude = _long(w, metadata, dim, original_context)
            frequencies = _slowed(frequencies.to(w.device), factors)
    divisors = w.vector("rope_freqs", size=(factors_of or dim) // 2, optional=True)
    if divisors is not None and factors_of is not None:
        divisors = divisors[:: factors_of // dim]  # base^(-2i / dim) is one of their frequencies
    return Rotary(_slowed(frequencies.to(w.device), divisors), pairs, magnitude)


def plain_frequencies(dim: int, base: float) -> Tensor:
    """base^(-2i / dim), float32 [dim / 2]."""
    return 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def yarn_frequencies(
    dim: int,
    base: float,
    *,
    factor: float,
    original_context: int,
    fast: float = 32.0,
    slow: float = 1.0,
    extrapolation: float = 1.0,
    truncate: bool = True,
) -> Tensor:
    """Frequencies with more than `fast` turns in the original context are kept, those with fewer
    than `slow` turns are divided by `factor`, those between are interpolated; float32 [dim / 2].

    Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", section 3.2.
    """

    def index(turns: float) -> float:
        return dim * log(original_context / (turns * 2 * pi)) / (2 * log(base))

    low, high = index(fast), index(slow)
    low, high = (floor(low), ceil(high)) if truncate else (low, high)
    low, high = max(low, 0), min(high, dim - 1)
    steps = torch.arange(dim // 2, dtype=torch.float32)
    ramp = ((steps - low) / (high - low or 0.001)).clamp(0, 1)
    kept = extrapolation * (1 - ramp)
    plain = base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return 1.0 / (factor * plain) * (1 - kept) + 1.0 / plain * kept


def _slowed(frequencies: Tensor, divisors: Tensor | None) -> Tensor:
    """frequencies / divisors."""
    return frequencies if divisors is None else derived(torch.div, frequencies, divisors)


def _rotated(metadata: Metadata, key_dim: int) -> int:
    dim = metadata.get_size("rope.dimension_count", key_dim)
    if dim % 2 or dim > key_dim:
        raise metadata.error(
            "rope.dimension_count", f"is {dim}; it must be even and at most {key_dim}"
        )
    return dim


def _kind(w: TensorScope, metadata: Metadata, default: str | None) -> str:
    key, others = "rope.scaling.type", ("factor", "original_context_length")
    if default is None and (w.has("rope_factors_long") or w.has("rope_factors_short")):
        default = "longrope"
    elif default is None and not all(metadata.has(f"rope.scaling.{name}") for name in others):
        default = "linear"
    kind = metadata.require(key, str) if default is None else metadata.get(key, str, default)
    kind = "none" if kind in _UNSCALED else kind
    if kind not in _KINDS:
        raise UnsupportedModelError(
            f"{metadata.path}: `{metadata.full_key('rope.scaling.type')}` is {kind}, which is not "
            f"supported; {', '.join(_KINDS[:-1])} and {_KINDS[-1]} are."
        )
    return kind


def _linear_factor(metadata: Metadata) -> float:
    """The factor of linear scaling; 1 if the file states neither a kind of scaling nor a factor."""
    if metadata.has("rope.scale_linear") and not metadata.has("rope.scaling.factor"):
        return metadata.get_positive("rope.scale_linear")
    stated = metadata.has("rope.scaling.type")
    return metadata.get_positive("rope.scaling.factor", None if stated else 1.0)


def _original_context(metadata: Metadata, default: int | None) -> int:
    """The context length before YaRN extends it.

    Ollama's converters of Qwen 2, 3 and 3.5 write only YaRN's type and factor. The default of
    `transformers` and llama.cpp is the whole context length.
    """
    whole = metadata.require_size("context_length")
    return metadata.get_size("rope.scaling.original_context_length", default or whole)


def _yarn(
    metadata: Metadata, dim: int, base: float, original_context: int, truncate: bool
) -> tuple[Tensor, float]:
    factor = metadata.get_positive("rope.scaling.factor")
    if base <= 1:
        raise metadata.error("rope.freq_base", f"is {base:g}; for YaRN it must be above 1")
    frequencies = yarn_frequencies(
        dim,
        base,
        factor=factor,
        original_context=original_context,
        fast=_turns(metadata, "fast", 32.0),
        slow=_turns(metadata, "slow", 1.0),
        extrapolation=_extrapolation(metadata),
        truncate=truncate,
    )
    return frequencies, _yarn_magnitude(metadata, factor)


def _turns(metadata: Metadata, which: str, default: float) -> float:
    key, other = f"rope.scaling.beta_{which}", f"rope.scaling.yarn_beta_{which}"
    return metadata.get_positive(key if metadata.has(key) else other, default)


def _extrapolation(metadata: Metadata) -> float:
    keys = "rope.scaling.extrapolation_factor", "rope.scaling.yarn_ext_factor"
    stated = _either(metadata, *keys)
    return 1.0 if stated is None or stated < 0 else stated


def _yarn_magnitude(metadata: Metadata, factor: float) -> float:
    """The factor of queries and keys that keeps the entropy of attention over a longer context.

    As in `transformers`: stated directly, or one logarithmic term, or the quotient of two.
    """
    outright = metadata.get("rope.scaling.yarn_attn_factor", float)
    multiplier = metadata.get("rope.scaling.attn_factor", float, 1.0)
    if outright is not None and outright > 0:
        return outright
    of_all = _either(metadata, "rope.scaling.mscale_all_dim", "rope.scaling.yarn_log_multiplier")
    of_one = metadata.get("rope.scaling.mscale", float, 1.0)
    if of_one and of_all:
        return multiplier * log_scale(factor, of_one) / log_scale(factor, of_all)
    return multiplier * log_scale(factor, 1.0)


def log_scale(factor: float, weight: float) -> float:
    """YaRN's logarithmic term for a context that is `factor` times as long; 1 without growth."""
    return 1.0 if factor <= 1 else 0.1 * weight * log(factor) + 1.0


def _long(
    w: TensorScope, metadata: Metadata, dim: int, default: int | None
) -> tuple[Tensor, float]:
    """The factors for the served context and the magnitude (Ding et al., "LongRoPE").

    All sequences use one set of factors, because keys cached with one set do not match queries with
    the other: the long set if contexts longer than the original are served, else the short set.
    """
    key = "rope.scaling.original_context_length"
    original = metadata.require_size(key) if default is None else metadata.get_size(key, default)
    longest = metadata.require_size("context_length")
    short, long = (w.vector(f"rope_factors_{name}", size=dim // 2) for name in ("short", "long"))
    served = min(longest, w.context_tokens or longest)
    growth = longest / original
    usual = sqrt(1 + log(growth) / log(original)) if growth > 1 < original else 1.0
    magnitude = metadata.get_positive("rope.scaling.attn_factor", usual)
    return long if served > original else short, magnitude


def _either(metadata: Metadata, key: str, other: str) -> float | None:
    """The number under one of two spellings of a key."""
    return metadata.get(key if metadata.has(key) else other, float)

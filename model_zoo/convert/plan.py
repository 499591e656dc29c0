"""Applies a conversion table to a checkpoint: maps stored tensors to tensors of the file."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from model_zoo.convert.checkpoint_reader import Checkpoint
from model_zoo.convert.configuration import INVALID, Configuration
from model_zoo.convert.mapping import EMBEDDING, OUTPUT, Computed, Conversion, Rule
from model_zoo.convert.transforms import Rows, unchanged
from runtime.errors import ModelFileError
from runtime.quant.block_types import block_type

_SHOWN = 8
# Buffers that old software stored in checkpoints: rotary frequencies and masks.
_BUFFERS = (
    "layers.{n}.self_attn.rotary_emb.inv_freq",
    "layers.{n}.attention.rotary_emb.inv_freq",
    "rotary_emb.inv_freq",
    "layers.{n}.self_attn.bias",
    "layers.{n}.self_attn.masked_bias",
)
_MATRIX = re.compile(r"blk\.\d+\.\w+\.weight")
_LAYER = re.compile(r"layers\.(\d{1,9})\.")


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of the file: `pieces` read its rows in order, [..., in] of any dtype.

    `blocks`: the pieces already are blocks of this type; `keep`: store the tensor as float32.
    """

    name: str
    shape: tuple[int, ...]
    pieces: Sequence[Callable[[], Tensor]]
    blocks: str | None = None
    keep: bool = False


def plan(
    conversion: Conversion,
    config: Configuration,
    checkpoint: Checkpoint,
    *,
    flavour: str,
    keep_blocks: bool = False,
) -> list[Target]:
    """All tensors of the file: those outside layers first, then layer by layer.

    keep_blocks: matrices of layers keep the GGUF blocks in which the checkpoint stores them.
    Matrices of a layer are adjacent, in the order of the rules. ModelFileError names stored tensors
    that are missing, unknown or contradict the configuration.
    """
    rules = [rule for rule in conversion.rules if flavour in rule.flavours]
    found, unknown = _matched(conversion, rules, config, checkpoint)
    if unknown:
        raise _error_listing(checkpoint, "tensors that this architecture does not know", unknown)
    missing = list(_missing(rules, found, config))
    if missing:
        raise _error_listing(checkpoint, "not all tensors that this architecture needs", missing)
    targets = []
    for index, rule in enumerate(rules):
        for place, sources in found[index].items():
            if rule.target == OUTPUT and config.tied:
                continue
            order = _order(place.layer, place.kind, index)
            target = _target(rule, place, sources, config, checkpoint)
            if keep_blocks:
                target, *factors = _in_blocks(target, rule, sources, config, checkpoint)
                targets += [(order, factor) for factor in factors]
            targets.append((order, target))
            if rule.target == EMBEDDING and config.tied and flavour in conversion.heads:
                targets.append((order, replace(target, name=OUTPUT)))
    for index, computed in enumerate(conversion.computed, start=len(rules)):
        tensor = config.derived(computed.target, computed.make)
        if tensor is not None:
            targets.append((_order(None, None, index), _computed(computed, tensor)))
    return [target for _, target in sorted(targets, key=lambda pair: pair[0])]


def gathered_numbers(
    conversion: Conversion, config: Configuration, checkpoint: Checkpoint
) -> dict[str, list[float]]:
    """The values of the table's gathered keys, by name. ModelFileError for layers without one."""
    stored = {_without_root(name, conversion.roots): name for name in checkpoint.names}
    wanted = {
        key.name: [key.source.replace("{n}", str(layer)) for layer in range(config.layers)]
        for key in conversion.gathered
    }
    missing = [source for sources in wanted.values() for source in sources if source not in stored]
    if missing:
        raise _error_listing(checkpoint, "not all tensors that this architecture needs", missing)
    return {
        name: [_number(checkpoint, stored[source]) for source in sources]
        for name, sources in wanted.items()
    }


def _number(checkpoint: Checkpoint, name: str) -> float:
    checkpoint.require(name, blocks=False)
    if math.prod(checkpoint.shape(name)) == 1:
        number = float(checkpoint.read(name))
        if math.isfinite(number):
            return number
    raise ModelFileError(f"{checkpoint.folder}: `{name}` is not a finite number.")


@dataclass(frozen=True, slots=True)
class _Place:
    """The values of the placeholders of a target."""

    layer: int | None
    expert: int | None
    kind: str | None


# For each source of a rule, the stored names by expert, or by 0 if the source has no expert.
_Sources = dict[int, dict[int, str]]


def _matched(
    conversion: Conversion, rules: Sequence[Rule], config: Configuration, checkpoint: Checkpoint
) -> tuple[list[dict[_Place, _Sources]], list[str]]:
    """The stored names that each rule matches, and names that nothing in the table matches."""
    patterns = [[_pattern(source) for source in rule.sources] for rule in rules]
    others = (*_BUFFERS, *conversion.drop, *(key.source for key in conversion.gathered))
    dropped = [_pattern(name) for name in others]
    found: list[dict[_Place, _Sources]] = [{} for _ in rules]
    unknown = []
    for name in checkpoint.names:
        short = _without_root(name, conversion.roots)
        if _drafts(short, config):
            continue
        known = any(pattern.fullmatch(short) for pattern in dropped)
        for index, (rule, sources) in enumerate(zip(rules, patterns, strict=True)):
            for number, pattern in enumerate(sources):
                match = pattern.fullmatch(short)
                groups = _numbered(rule, match, config)
                if groups is not None and _applies(rule, groups, config):
                    known = True
                    _note(found[index], rule, number, groups, name)
        if not known:
            unknown.append(name)
    return found, unknown


def _drafts(name: str, config: Configuration) -> bool:
    """Whether it is in one of the layers after the others that predict further tokens for drafts,
    which files omit."""
    match = _LAYER.match(name) if config.get("num_nextn_predict_layers") else None
    if match is None:
        return False
    return 0 <= int(match[1]) - config.layers < config.require_size("num_nextn_predict_layers")


def _numbered(
    rule: Rule, match: re.Match[str] | None, config: Configuration
) -> Mapping[str, str | None] | None:
    """Values of the placeholders, with the layer number of the file; None without a match."""
    if match is None or rule.layer is None:
        return None if match is None else match.groupdict()
    layer = rule.layer(config, int(match["n"]))
    return None if layer is None else {**match.groupdict(), "n": str(layer)}


def _applies(rule: Rule, groups: Mapping[str, str | None], config: Configuration) -> bool:
    """Tensors of layers beyond the stated number are left to `_target`, which refuses them."""
    layer = int(groups.get("n") or 0)
    if rule.only is None or layer >= config.layers:
        return True
    only = rule.only
    return config.derived(rule.target, lambda c: only(c, layer))


def _note(
    found: dict[_Place, _Sources],
    rule: Rule,
    number: int,
    groups: Mapping[str, str | None],
    name: str,
) -> None:
    layer, expert = groups.get("n"), groups.get("e")
    own = None if expert is None or "{e}" not in rule.target else int(expert)
    place = _Place(None if layer is None else int(layer), own, groups.get("kind"))
    by_expert = found.setdefault(place, {}).setdefault(number, {})
    key = 0 if expert is None or own is not None else int(expert)
    if key in by_expert:
        raise ModelFileError(f"`{by_expert[key]}` and `{name}` are stored for the same tensor.")
    by_expert[key] = name


def _pattern(name: str) -> re.Pattern[str]:
    """{n} and {e} match up to nine digits, a final `.*` weight or bias, `**` anything."""
    escaped = re.escape(name).replace(r"\*\*", ".+")
    for placeholder in "ne":
        escaped = escaped.replace(rf"\{{{placeholder}\}}", rf"(?P<{placeholder}>\d{{1,9}})")
    return re.compile(escaped.replace(r"\.\*", r"\.(?P<kind>weight|bias)"))


def _without_root(name: str, roots: Iterable[str]) -> str:
    return next((name.removeprefix(root) for root in roots if name.startswith(root)), name)


def _missing(
    rules: Sequence[Rule], found: Sequence[Mapping[_Place, _Sources]], config: Configuration
) -> Iterable[str]:
    """Required stored names that no rule for the same target has found."""
    made = {
        (rule.target, place.layer)
        for rule, places in zip(rules, found, strict=True)
        for place in places
        if place.kind != "bias"
    }
    for rule, places in zip(rules, found, strict=True):
        for layer in _wanted_layers(rule, config):
            if (rule.target, layer) not in made:
                yield from (_source_name(source, layer) for source in rule.sources)
        for place, sources in places.items():
            for number in set(range(len(rule.sources))) - set(sources):
                yield _source_name(rule.sources[number], place.layer)


def _wanted_layers(rule: Rule, config: Configuration) -> Sequence[int | None]:
    if rule.optional or ("{n}" not in rule.target and not _applies(rule, {}, config)):
        return ()
    if rule.target == OUTPUT:  # a multimodal model may state it for the whole
        return () if config.tied or config.whole.get("tie_word_embeddings") else (None,)
    if "{n}" not in rule.target:
        return (None,)
    return [n for n in range(config.layers) if _applies(rule, {"n": str(n)}, config)]


def _source_name(source: str, layer: int | None) -> str:
    return source.replace("{n}", str(layer)).replace(".*", ".weight")


def _order(layer: int | None, kind: str | None, rule: int) -> tuple[int, bool, int]:
    return (-1 if layer is None else layer, kind == "bias", rule)


def _target(
    rule: Rule, place: _Place, sources: _Sources, config: Configuration, checkpoint: Checkpoint
) -> Target:
    name = _named_target(rule, place)
    if place.layer is not None and place.layer >= config.layers:
        raise config.error(f"states {config.layers} layers, but there is {sources[0]}")
    transform = partial(rule.transform, config) if rule.transform else lambda tensor: tensor
    stored = [sources[number] for number in range(len(rule.sources))]
    experts = sorted(stored[0])
    if experts != list(range(len(experts))) or any(sorted(names) != experts for names in stored):
        raise ModelFileError(f"{checkpoint.folder}: `{name}` lacks some of its experts' tensors.")
    for source in (names[expert] for names in stored for expert in experts):
        checkpoint.require(source, blocks=rule.blocks is not None)
    stacked = len(experts) > 1 or ("{e}" in rule.sources[0] and "{e}" not in rule.target)
    pieces, shapes = [], set()
    for expert in experts:
        names = [by_expert[expert] for by_expert in stored]
        slices = range(checkpoint.shape(names[0])[0]) if rule.each else (None,)
        for index in slices:
            pieces.append(partial(_piece, transform, checkpoint, names, index))
        shapes.add(_shape(transform, checkpoint, names, rule))
    if rule.parts:
        rows = sum(checkpoint.shape(found)[0] for found in stored[0].values())
        return Target(name, (rows, *shapes.pop()[1:]), pieces, rule.blocks, rule.keep)
    if len(shapes) > 1:
        raise ModelFileError(f"{checkpoint.folder}: the experts of `{name}` differ in shape.")
    lead = (len(pieces),) if stacked or rule.each else ()
    return Target(name, (*lead, *shapes.pop()), pieces, rule.blocks, rule.keep)


def _in_blocks(
    target: Target, rule: Rule, sources: _Sources, config: Configuration, checkpoint: Checkpoint
) -> list[Target]:
    """The target with the stored blocks and the factors of its matrices, if it consists of whole
    stored rows; otherwise the target as it is."""
    transform = unchanged if rule.transform is None else rule.transform
    names = [name for _, name in sorted(sources[0].items())]
    movable = isinstance(transform, Rows) and len(sources) == 1 and not (rule.each or rule.keep)
    if not movable or rule.blocks or not _MATRIX.fullmatch(target.name):
        return [target]
    kinds = {checkpoint.blocks(name) for name in names}
    kind = kinds.pop()
    if kinds or kind is None:
        return [target]

    def piece(name: str) -> Tensor:
        return transform(config, checkpoint.read_blocks(name))

    blocks = replace(target, pieces=[partial(piece, name) for name in names], blocks=kind)
    factors = [checkpoint.factor(name) for name in names]
    stated = [factor for factor in factors if factor is not None]
    if not stated:
        return [blocks]
    name = f"{target.name.removesuffix('weight')}scale"
    return [blocks, Target(name, (len(stated),), [lambda: torch.cat(stated)], keep=True)]


def _named_target(rule: Rule, place: _Place) -> str:
    name = rule.target.replace("{n}", str(place.layer)).replace("{e}", str(place.expert))
    return name.replace(".*", f".{place.kind}")


def _piece(
    transform: Callable[..., Tensor],
    checkpoint: Checkpoint,
    names: Sequence[str],
    index: int | None,
) -> Tensor:
    return transform(*(checkpoint.read(name, index=index) for name in names))


def _shape(
    transform: Callable[..., Tensor], checkpoint: Checkpoint, names: Sequence[str], rule: Rule
) -> tuple[int, ...]:
    """The shape of a piece, found by transforming meta tensors."""
    dtype = torch.float32 if rule.blocks is None else torch.uint8
    shapes = [checkpoint.shape(name)[1 if rule.each else 0 :] for name in names]
    empty = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
    try:
        shape = tuple(transform(*empty).shape)
        if not shape:
            raise ValueError("a number")
    except (RuntimeError, *INVALID) as error:
        raise ModelFileError(
            f"{checkpoint.folder}: `{names[0]}` has the shape {shapes[0]}, which this architecture "
            "cannot have with these settings."
        ) from error
    if rule.blocks is None:
        return shape
    kind = block_type(rule.blocks)
    return (*shape[:-1], shape[-1] // kind.block_bytes * kind.block_elements)


def _computed(computed: Computed, tensor: Tensor) -> Target:
    return Target(computed.target, tuple(tensor.shape), [lambda: tensor], keep=True)


def _error_listing(checkpoint: Checkpoint, what: str, names: Sequence[str]) -> ModelFileError:
    shown = ", ".join(names[:_SHOWN])
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ModelFileError(f"{checkpoint.folder}: has {what}: {shown}{more}.")

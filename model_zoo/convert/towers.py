"""The parts of the tables that most vision towers share."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from model_zoo.convert.configuration import Configuration, optional_json
from model_zoo.convert.mapping import LLAMA_CPP, OLLAMA, Key, Rule, Transform
from runtime.errors import UnsupportedModelError

STANDARD = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
# Of the text model: a tower does without.
TEXT = ("language_model.**", "lm_head.**", "embed_tokens.**", "layers.**", "norm.**")

SIZES = (
    Key("vision.block_count", "num_hidden_layers"),
    Key("vision.embedding_length", "hidden_size"),
    Key("vision.feed_forward_length", "intermediate_size"),
    Key("vision.attention.head_count", "num_attention_heads"),
    Key("vision.patch_size", "patch_size"),
)
IMAGE_SIZE = Key("vision.image_size", "image_size")


def roots(*towers: str) -> tuple[str, ...]:
    """Prefixes of a checkpoint's tensors that a table does without."""
    return (*(f"{whole}{tower}." for tower in towers for whole in ("model.", "")), "model.")


def clip(
    projector: str, colours: tuple[tuple[float, ...], tuple[float, ...]], *, eps: float | str
) -> tuple[Key, ...]:
    """What every file of llama.cpp's for a tower says beside its sizes.

    `colours`: mean and deviation where the checkpoint's processor names none; `eps`: of the norms,
    or the setting that has it.
    """
    stated = [
        Key("has_vision_encoder", lambda c: True),
        Key("projector_type", lambda c: projector),
        Key("vision.projection_dim", lambda c: c.model.require_size("hidden_size")),
        Key("vision.image_mean", lambda c: _colours(c, "image_mean", colours[0])),
        Key("vision.image_std", lambda c: _colours(c, "image_std", colours[1])),
        epsilon(eps),
    ]
    return tuple(Key(key.name, key.source, of=key.of, flavours=(LLAMA_CPP,)) for key in stated)


def epsilon(
    eps: float | str, *flavours: str, name: str = "vision.attention.layer_norm_epsilon"
) -> Key:
    source: str | Callable[[Configuration], float] = eps if isinstance(eps, str) else lambda c: eps
    return Key(name, source, of=float, flavours=flavours or (LLAMA_CPP, OLLAMA))


def both(
    source: str | tuple[str, ...],
    llama_cpp: str,
    ollama: str,
    transform: Transform | None = None,
    **conditions: Any,
) -> tuple[Rule, Rule]:
    """A tensor that the flavours call differently."""
    return (
        Rule(source, llama_cpp, transform, flavours=(LLAMA_CPP,), **conditions),
        Rule(source, ollama, transform, flavours=(OLLAMA,), **conditions),
    )


def part_of_rows(index: int, count: int) -> Transform:
    """One of so many equal parts of the rows."""
    return lambda config, rows: rows.chunk(count)[index]


def frame(index: int) -> Transform:
    """weight (out, channels, frames, side, side) -> (out, channels, side, side) of one frame."""
    return lambda config, weight: weight[:, :, index]


def stacked(config: Configuration, weight: Tensor) -> Tensor:
    """(out, channels, frames, side, side) -> (out * channels, frames, side, side)."""
    return weight.flatten(0, 1)


def split_qkv(source: str, target: str, *flavours: str) -> tuple[Rule, ...]:
    """Queries, keys and values from one tensor; `{}` in the target stands for q, k and v."""
    return tuple(
        Rule(source, target.format(part, n="{n}"), part_of_rows(index, 3), flavours=flavours)
        for index, part in enumerate("qkv")
    )


def preprocessing(config: Configuration) -> Mapping[str, Any]:
    """The settings of the checkpoint's image processor."""
    folder = config.path.parent
    nested = optional_json(folder / "processor_config.json").get("image_processor")
    stated = nested if isinstance(nested, Mapping) else {}
    return {**stated, **optional_json(folder / "preprocessor_config.json")}


def most_pixels(config: Configuration) -> int | None:
    """The largest area that the checkpoint's processor makes of a picture, where it says so."""
    return _pixels(config, "max_pixels", "longest_edge")


def least_pixels(config: Configuration) -> int | None:
    return _pixels(config, "min_pixels", "shortest_edge")


def longest_edge(config: Configuration) -> int | None:
    """To which the checkpoint's processor scales a picture, where it says so."""
    size = preprocessing(config).get("size")
    value = size.get("longest_edge") if isinstance(size, Mapping) else None
    return None if value is None else int(value)


def known_processing(name: str, known: Any) -> Callable[[Configuration], None]:
    """Refuses processors that are set otherwise: readers of the files take this for granted."""

    def check(config: Configuration) -> None:
        stated = preprocessing(config).get(name, known)
        if stated != known:
            raise UnsupportedModelError(
                f"{config.path}: its image processor has {str(stated)[:80]} as `{name}`, where "
                f"files of this architecture mean {known}."
            )

    return check


def same_side(name: str) -> Callable[[Configuration], None]:
    """Refuses processors whose `name`, a side or several, is not that of the tower's images."""

    def check(config: Configuration) -> None:
        stated, side = preprocessing(config).get(name), config.require("image_size")
        sides = list(stated.values()) if isinstance(stated, Mapping) else [stated]
        expected = side if isinstance(side, list) else [side]
        if stated is not None and not all(one in expected for one in sides):
            raise UnsupportedModelError(
                f"{config.path}: its image processor has {str(stated)[:80]} as `{name}`, but the "
                f"vision part takes images of {expected[0]} pixels on a side."
            )

    return check


def known_setting(name: str, *known: Any) -> Callable[[Configuration], None]:
    """Refuses other values: readers of the files take one of these for granted."""

    def check(config: Configuration) -> None:
        stated = config.get(name, known[0])
        if stated not in known:
            raise UnsupportedModelError(
                f"{config.path}: `{name}` of the vision part is {stated!r}, where files of this "
                f"architecture mean {' or '.join(map(repr, known))}."
            )

    return check


def known_of_model(name: str, *known: Any) -> Callable[[Configuration], None]:
    """The same for a setting of the whole model."""
    check = known_setting(name, *known)
    return lambda config: check(config.model)


def rope_base(config: Configuration) -> float:
    return float(config.rope().get("rope_theta", 10000.0))


def known_rope_base(base: float) -> Callable[[Configuration], None]:
    """Refuses others, where files do not state it."""

    def check(config: Configuration) -> None:
        if rope_base(config) != base:
            raise UnsupportedModelError(
                f"{config.path}: the rotary base of the vision part is {rope_base(config):g}, "
                f"where files of this flavour mean {base:g}."
            )

    return check


def _colours(config: Configuration, name: str, default: tuple[float, ...]) -> list[float]:
    stated = preprocessing(config).get(name)
    return [float(value) for value in (stated if isinstance(stated, list) else default)]


def _pixels(config: Configuration, name: str, edge: str) -> int | None:
    stated = preprocessing(config)
    size = stated.get("size")
    value = stated.get(name) or (size.get(edge) if isinstance(size, Mapping) else None)
    return None if value is None else int(value)

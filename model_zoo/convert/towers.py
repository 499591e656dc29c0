"""Parts of conversion tables that several vision models share."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from model_zoo.convert.configuration import Configuration, optional_json
from model_zoo.convert.mapping import LLAMA_CPP, OLLAMA, Check, Key, Rule, Transform
from model_zoo.images.normalise import Normalisation
from runtime.errors import UnsupportedModelError

Epsilon = float | str | Callable[[Configuration], float]
# Tensors of the text model, which the table of a vision model ignores.
TEXT = ("language_model.**", "lm_head.**", "embed_tokens.**", "layers.**", "norm.**")

SIZES = (
    Key("vision.block_count", "num_hidden_layers"),
    Key("vision.embedding_length", "hidden_size"),
    Key("vision.feed_forward_length", "intermediate_size"),
    Key("vision.attention.head_count", "num_attention_heads"),
    Key("vision.patch_size", "patch_size"),
)
IMAGE_SIZE = Key("vision.image_size", "image_size")
# Modules of the layers of CLIP's and SigLIP's encoders, for `layers`.
CLIP_MODULES = (
    ("layer_norm1", "ln1"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.out_proj", "attn_out"),
    ("layer_norm2", "ln2"),
    ("mlp.fc1", "ffn_up"),
    ("mlp.fc2", "ffn_down"),
)


def roots(*towers: str) -> tuple[str, ...]:
    """Prefixes of a checkpoint's tensor names, which the rules of a table leave out."""
    return (*(f"{whole}{tower}." for tower in towers for whole in ("model.", "")), "model.")


def clip(projector: str, default: Normalisation, *, eps: Epsilon) -> tuple[Key, ...]:
    """The keys, other than sizes, of all vision models in llama.cpp's files.

    `default`: see `colours`; `eps`: the epsilon of the norms, the name of its setting or a function
    of the configuration.
    """
    stated = [
        Key("has_vision_encoder", lambda c: True),
        Key("projector_type", lambda c: projector),
        Key("vision.projection_dim", lambda c: c.model.require_size("hidden_size")),
        epsilon(eps),
    ]
    only = (Key(key.name, key.source, of=key.of, flavours=(LLAMA_CPP,)) for key in stated)
    return (*only, *colours(default, LLAMA_CPP))


def colours(default: Normalisation, *flavours: str) -> tuple[Key, Key]:
    """Mean and deviation of each colour; `default`: used if the checkpoint's image processor states
    none."""
    return (
        Key(
            "vision.image_mean",
            lambda c: _colours(c, "image_mean", default.mean),
            flavours=flavours,
        ),
        Key(
            "vision.image_std",
            lambda c: _colours(c, "image_std", default.std),
            flavours=flavours,
        ),
    )


def epsilon(eps: Epsilon, *flavours: str, name: str = "vision.attention.layer_norm_epsilon") -> Key:
    source = eps if isinstance(eps, str) or callable(eps) else lambda c: eps
    return Key(name, source, of=float, flavours=flavours or (LLAMA_CPP, OLLAMA))


def both(
    source: str | tuple[str, ...],
    llama_cpp: str,
    ollama: str,
    transform: Transform | None = None,
    **conditions: Any,
) -> tuple[Rule, Rule]:
    """Rules for a tensor whose name depends on the flavour."""
    return (
        Rule(source, llama_cpp, transform, flavours=(LLAMA_CPP,), **conditions),
        Rule(source, ollama, transform, flavours=(OLLAMA,), **conditions),
    )


def layers(source: str, modules: Iterable[tuple[str, ...]]) -> tuple[Rule, ...]:
    """Rules for the modules of each layer. `modules`: the name after `source`, in llama.cpp's files
    and, if it differs, in Ollama's."""
    return tuple(
        rule
        for module, llama_cpp, *ollama in modules
        for rule in (
            both(
                f"{source}.{module}.*",
                f"v.blk.{{n}}.{llama_cpp}.*",
                f"v.blk.{{n}}.{ollama[0]}.*",
            )
            if ollama
            else (Rule(f"{source}.{module}.*", f"v.blk.{{n}}.{llama_cpp}.*"),)
        )
    )


def part_of_rows(index: int, count: int) -> Transform:
    """Part `index` of `count` equal parts of the rows."""
    return lambda config, rows: rows.chunk(count)[index]


def frame(index: int) -> Transform:
    """[out, channels, frames, side, side] -> [out, channels, side, side] of frame `index`."""
    return lambda config, weight: weight[:, :, index]


def stacked(config: Configuration, weight: Tensor) -> Tensor:
    """[out, channels, frames, side, side] -> [out * channels, frames, side, side]."""
    return weight.flatten(0, 1)


def split_qkv(*flavours: str) -> tuple[Rule, ...]:
    """Rules that split one tensor into queries, keys and values."""
    source = "blocks.{n}.attn.qkv.*"
    return tuple(
        Rule(source, f"v.blk.{{n}}.attn_{part}.*", part_of_rows(index, 3), flavours=flavours)
        for index, part in enumerate("qkv")
    )


def preprocessing(config: Configuration) -> Mapping[str, Any]:
    """The settings of the checkpoint's image processor."""
    folder = config.path.parent
    nested = optional_json(folder / "processor_config.json").get("image_processor")
    stated = nested if isinstance(nested, Mapping) else {}
    return {**stated, **optional_json(folder / "preprocessor_config.json")}


def most_pixels(config: Configuration) -> int | None:
    """Pixels of the largest image that the checkpoint's processor produces, if it states that."""
    return _pixels(config, "max_pixels", "longest_edge")


def least_pixels(config: Configuration) -> int | None:
    """Pixels of the smallest image, if stated."""
    return _pixels(config, "min_pixels", "shortest_edge")


def longest_edge(config: Configuration) -> int | None:
    """The longer side to which the checkpoint's processor scales images, if it states that."""
    size = preprocessing(config).get("size")
    value = size.get("longest_edge") if isinstance(size, Mapping) else None
    return None if value is None else int(value)


def known_processing(name: str, known: Any) -> Check:
    """Refuses values of an image processor's setting other than those that readers assume."""
    return _one_of(f"`{name}` of the image processor", lambda c: preprocessing(c).get(name), known)


def same_side(name: str) -> Check:
    """Refuses image processors whose setting `name`, one side or several, is not `image_size`."""

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


def known_setting(name: str, *known: Any) -> Check:
    """Refuses values of a vision model's setting other than those that readers assume."""
    return _one_of(f"`{name}` of the vision part", lambda c: c.get(name), *known)


def known_of_model(name: str, *known: Any) -> Check:
    """As `known_setting`, for a setting of the whole model."""
    return _one_of(f"`{name}` of the model", lambda c: c.model.get(name), *known)


def known_rope_base(base: float) -> Check:
    """Refuses rotary bases other than `base`, for files that do not state one."""
    return _one_of("the rotary base of the vision part", rope_base, base)


def rope_base(config: Configuration) -> float:
    return float(config.rope().get("rope_theta", 10000.0))


def _one_of(what: str, read: Callable[[Configuration], Any], *known: Any) -> Check:
    """Refuses values other than those in `known`; an absent value counts as the first of them."""

    def check(config: Configuration) -> None:
        stated = read(config)
        if stated is not None and stated not in known:
            raise UnsupportedModelError(
                f"{config.path}: {what} is {str(stated)[:80]}, where files of this architecture "
                f"mean {' or '.join(map(str, known))}."
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

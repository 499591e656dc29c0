"""The types of conversion tables: keys and tensors of an architecture's GGUF files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor

from model_zoo.convert.configuration import Configuration
from runtime.errors import UnsupportedModelError

LLAMA_CPP, OLLAMA = "llama.cpp", "ollama"
FLAVOURS = (LLAMA_CPP, OLLAMA)
# A head that is tied to the embedding is left out, except as `Conversion.heads` states.
EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
# Prefixes of a text model's tensors in multimodal and in text checkpoints.
TEXT_ROOTS = ("language_model.model.", "model.language_model.", "language_model.", "model.")
# Maps the configuration and the stored tensors of a rule to the tensor of the file.
Transform = Callable[..., Tensor]
Check = Callable[[Configuration], None]


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the file and the source of its value.

    `name`: without the architecture. `source`: a name in config.json, or a function of the
    configuration, which may return None to omit the key. A missing name is an error unless the key
    is `optional`. Integers become uint32, other numbers float32; `of` converts the value.
    """

    name: str
    source: str | Callable[[Configuration], Any]
    optional: bool = False
    of: Callable[[Any], Any] | None = None
    flavours: tuple[str, ...] = FLAVOURS


@dataclass(frozen=True, slots=True)
class GatheredKey:
    """A key with a number for each layer, which the checkpoint stores as a tensor.

    `name`: as of `Key`. `source`: the stored name, without a prefix of `roots`, with {n}.
    """

    name: str
    source: str


@dataclass(frozen=True, slots=True)
class Rule:
    """Stored tensors and the tensor of the file that they become.

    Names may contain {n}, a layer, and {e}, an expert or, with `parts`, a part of a matrix; a final
    `.*` stands for `.weight` and, if present, `.bias`. Names are those in the checkpoint without a
    prefix of `roots`.

    source: one or several names, in the order of the transform's arguments. A source with {e} for a
    target without {e} stacks all experts. Rules for the same target are alternatives.
    transform: called as `transform(configuration, *tensors)`.
    parts: a source with {e} for a target without {e} joins the rows of all parts instead.
    each: the stored tensors are stacks, and the transform is applied to each slice.
    optional: it may be absent in some or all layers. only: whether a layer has it (0 for tensors
    outside layers); in other layers it counts as unknown.
    layer: the value of {n} in the target, if it differs from the source's; None: unknown.
    blocks: the transform returns blocks of this type, uint8 [..., row bytes].
    keep: store it as float32.
    """

    source: str | tuple[str, ...]
    target: str
    transform: Transform | None = None
    parts: bool = False
    each: bool = False
    optional: bool = False
    only: Callable[[Configuration, int], bool] | None = None
    layer: Callable[[Configuration, int], int | None] | None = None
    blocks: str | None = None
    keep: bool = False
    flavours: tuple[str, ...] = FLAVOURS

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,) if isinstance(self.source, str) else self.source


@dataclass(frozen=True, slots=True)
class Computed:
    """A float32 tensor computed from the configuration; None if the model needs none."""

    target: str
    make: Callable[[Configuration], Tensor | None]


@dataclass(frozen=True, slots=True)
class Conversion:
    """The conversion table of one architecture.

    serves: names in the `architectures` of config.json.
    model_types: values of `model_type` that multimodal checkpoints use for their text model.
    text_types_of_others: values of `model_type` of the text models in such checkpoints for which
    other families have the table.
    architecture: `general.architecture`, or a value for each flavour that has the architecture, or
    a function of the configuration.
    gathered: keys whose values are in tensors.
    roots: prefixes of tensor names, of which the first match is removed.
    drop: names (as in rules; `**` matches anything) of tensors to ignore, besides buffers.
    defaults: the family's values for settings that are absent from config.json.
    nested: the same for the text model of a multimodal checkpoint, by its `model_type`. Older
    versions of `transformers` left out all of its settings that equal their defaults.
    spellings: alternative names of settings in config.json, by the usual names.
    check: refuses settings that files cannot express. checks: such checks for single flavours.
    tokenizer: `tokenizer.ggml.model`, if the vocabulary alone does not determine it.
    heads: flavours whose readers require a head, so that a tied one is a copy of the embedding.
    part: of a vision model, the names in config.json under which its settings are.
    """

    serves: tuple[str, ...]
    architecture: str | Mapping[str, str] | Callable[[Configuration], str]
    keys: Sequence[Key]
    rules: Sequence[Rule]
    computed: Sequence[Computed] = ()
    gathered: Sequence[GatheredKey] = ()
    model_types: tuple[str, ...] = ()
    text_types_of_others: tuple[str, ...] = ()
    roots: tuple[str, ...] = TEXT_ROOTS
    drop: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    nested: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: MappingProxyType({}))
    spellings: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    check: Check | None = None
    checks: Mapping[str, Check] = field(default_factory=lambda: MappingProxyType({}))
    tokenizer: str | None = None
    heads: tuple[str, ...] = ()
    part: tuple[str, ...] = ("vision_config",)

    @property
    def flavours(self) -> tuple[str, ...]:
        """The flavours that have the architecture, llama.cpp's first."""
        named = self.architecture
        return tuple(f for f in FLAVOURS if f in named) if isinstance(named, Mapping) else FLAVOURS

    def architecture_for(self, flavour: str, config: Configuration) -> str:
        """UnsupportedModelError if the flavour does not have the architecture."""
        named = self.architecture
        if isinstance(named, str):
            return named
        if callable(named):
            return named(config)
        if flavour not in named:
            raise UnsupportedModelError(
                f"{self.serves[0]}: the flavour {flavour} does not have this architecture; "
                f"{', '.join(named)} does."
            )
        return named[flavour]

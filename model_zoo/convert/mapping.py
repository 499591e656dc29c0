"""How an architecture's checkpoints become GGUF: a table of keys and of tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor

from model_zoo.convert.configuration import Configuration
from runtime.errors import UnsupportedModelError

LLAMA_CPP, OLLAMA = "llama.cpp", "ollama"
FLAVOURS = (LLAMA_CPP, OLLAMA)
# The head is missing where it is tied to the embedding, and left out where it only repeats it.
EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
# Prefixes of a text model's tensors in checkpoints of several parts and of one.
TEXT_ROOTS = ("language_model.model.", "model.language_model.", "language_model.", "model.")
# From the configuration and the stored tensors of a rule to the tensor of the file.
Transform = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the file and where its value comes from.

    `name` is written without the architecture. `source`: a name in config.json, or a function of
    the configuration; None from it leaves the key out, but a missing name of a key that is not
    `optional` is an error. Whole numbers become uint32, others float32; `of` converts the value.
    """

    name: str
    source: str | Callable[[Configuration], Any]
    optional: bool = False
    of: Callable[[Any], Any] | None = None
    flavours: tuple[str, ...] = FLAVOURS


@dataclass(frozen=True, slots=True)
class Rule:
    """Stored tensors and the tensor of the file that they become.

    Names may hold {n}, a layer, and {e}, an expert; `.*` at the end stands for `.weight` and, where
    there is one, `.bias`. Names are stored ones without the prefix of the text model (`roots`).

    source: one name or several, which the transform gets in this order. A source with {e} for a
    target without it stacks all experts. Rules for one target are alternatives.
    transform: called as `transform(configuration, *tensors)`.
    each: the stored tensors are stacks, and the transform gets them slice by slice.
    optional: it may be missing, in all layers or some. only: which layers have it, or of tensors
    of the whole model, whether there is one (asked with 0); elsewhere it is unknown.
    layer: the number that {n} has in the target, where it is not that of the source; None: unknown.
    blocks: the transform gives finished blocks of this type, uint8 [..., row bytes].
    keep: it stays in float32.
    """

    source: str | tuple[str, ...]
    target: str
    transform: Transform | None = None
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
    """A float32 tensor made from the configuration alone; None where the model needs none."""

    target: str
    make: Callable[[Configuration], Tensor | None]
    flavours: tuple[str, ...] = FLAVOURS


@dataclass(frozen=True, slots=True)
class Conversion:
    """The whole table of one architecture.

    serves: names in the `architectures` of config.json.
    model_types: values of `model_type` by which multimodal checkpoints name their text model.
    architecture: `general.architecture`, or one for each flavour that has the architecture.
    roots: prefixes of the text model's tensors, of which the first that fits is taken off.
    drop: names (as in rules, `**` for any rest) of tensors that a file does without.
    defaults: what the family takes for settings that config.json leaves out.
    spellings: other names of settings in config.json, by the usual ones.
    check: refuses what such files cannot express. checks: the same for one flavour.
    tokenizer: `tokenizer.ggml.model` where the vocabulary alone does not tell.
    """

    serves: tuple[str, ...]
    architecture: str | Mapping[str, str]
    keys: Sequence[Key]
    rules: Sequence[Rule]
    computed: Sequence[Computed] = ()
    model_types: tuple[str, ...] = ()
    roots: tuple[str, ...] = TEXT_ROOTS
    drop: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    spellings: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    check: Callable[[Configuration], None] | None = None
    checks: Mapping[str, Callable[[Configuration], None]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    tokenizer: str | None = None

    def architecture_for(self, flavour: str) -> str:
        """UnsupportedModelError where no reader of that flavour knows the architecture."""
        named = self.architecture
        if isinstance(named, str):
            return named
        if flavour not in named:
            raise UnsupportedModelError(
                f"{self.serves[0]}: files of the flavour {flavour} do not know this architecture; "
                f"those of {', '.join(named)} do."
            )
        return named[flavour]

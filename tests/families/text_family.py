"""A row of the table of text families, and the tiny models that are made from it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from transformers import PreTrainedConfig

from tests.families.agreement import Pair, load_decoder
from tests.families.delta_rule import step_by_step
from tests.gguf_files import matrices, rewrite
from tests.tiny_models import tiny_tokenizer, write_tiny

Changes = Mapping[str, Any]
SIZES: Changes = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
}
WIDE = {"hidden_size": 256, "intermediate_size": 256}
WIDE_HEADS = WIDE | {"head_dim": 64}
TIED = {"tie_word_embeddings": True}
YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Of heads of 16 elements.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.02, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0],
    "long_factor": [1.0, 1.3, 2.0, 4.0, 8.0, 12.0, 24.0, 48.0],
}
# Keys of files that most families derive from the tensors.
KEY_LENGTHS = dict.fromkeys(("attention.key_length", "attention.value_length"))
CONTEXT_TOKENS = 512


def rope(theta: float, **others: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **others}}


@dataclass(frozen=True)
class Variant:
    """A file that spells the same model differently: other keys, or another converter's flavour.

    changes: settings that differ from `config`. keys: keys of the file without the architecture;
    None removes a key. architecture: another name of the architecture. tensors: from those of the
    file, the changed ones; None removes a tensor.
    """

    changes: Changes = field(default_factory=dict)
    keys: Changes = field(default_factory=dict)
    flavour: str = "llama.cpp"
    config: str = "plain"
    architecture: str | None = None
    tensors: Callable[[Mapping[str, np.ndarray]], Changes] | None = None


@dataclass(frozen=True)
class CompleteFile:
    """A file of which test_missing_keys.py removes each key and each tensor in turn.

    optional_keys: those that the loader does not need, without the architecture, separated by
    spaces; every other missing key must be an error. optional_tensors: likewise. unused_tensors:
    those of them that no layer uses, whatever their shapes.
    """

    config: str = "plain"
    flavour: str = ""
    optional_keys: str = ""
    optional_tensors: str = ""
    unused_tensors: str = ""


@dataclass(frozen=True)
class TextFamily:
    """A text architecture: its tiny configurations in `transformers`, and what is checked of them.

    make: a configuration from settings; `sizes` are those that all configurations share.
    configs: by name, the settings of each configuration, or a whole configuration.
    wide: settings with which rows are multiples of 256, for all types of weights; None to skip.
    divided: the configuration that ranks divide, with every kind of layer; None where they cannot.
    files: those of which keys and tensors are removed, to see that the loader names them.
    variants: files that must mean the same as `transformers`.
    effective_keys: keys with other values, each of which must change the logits.
    refused: keys with values that are refused, with a part of the message.
    options: those of `write_tiny`. keys: keys that are added to every file.
    delta_rule: modules of `transformers` that shall compute the gated delta rule step by step.
    """

    make: Callable[..., PreTrainedConfig]
    sizes: Changes
    configs: Mapping[str, Changes | PreTrainedConfig]
    wide: Changes | None = field(default_factory=lambda: WIDE)
    divided: str | None = "plain"
    files: Sequence[CompleteFile] = (CompleteFile(),)
    variants: Mapping[str, Variant] = field(default_factory=dict)
    effective_keys: Changes = field(default_factory=dict)
    refused: Sequence[tuple[Changes, str]] = ()
    options: Changes = field(default_factory=dict)
    keys: Changes = field(default_factory=dict)
    delta_rule: Sequence[ModuleType] = ()

    def config(self, name: str = "plain", **changes: Any) -> PreTrainedConfig:
        settings = self.configs[name]
        if isinstance(settings, PreTrainedConfig):
            assert not changes, f"{name} is a whole configuration"
            return settings
        return self.make(**(self.sizes | settings | changes))

    def wide_config(self) -> PreTrainedConfig:
        assert self.wide is not None
        return self.make(**(self.sizes | self.wide))

    def write(self, path: Path, name: str = "plain", *, flavour: str = "", **changes: Any) -> Any:
        """Write a configuration's tiny model to `path`; returns its twin in `transformers`."""
        options = dict(self.options) | ({"flavour": flavour} if flavour else {})
        twin = write_tiny(path, self.config(name, **changes), **options)
        if self.keys:
            path.write_bytes(changed(path, self.keys).read_bytes())
        if self.delta_rule:
            twin.forward = step_by_step(*self.delta_rule)(twin.forward)
        return twin

    def variant(self, path: Path, name: str) -> tuple[Path, Any]:
        """The file of a variant, in the folder of `path`, and its twin in `transformers`."""
        spelled = self.variants[name]
        twin = self.write(path, spelled.config, flavour=spelled.flavour, **spelled.changes)
        tensors = spelled.tensors(matrices(path)) if spelled.tensors else None
        return changed(path, spelled.keys, tensors, spelled.architecture), twin

    def pair(self, path: Path, name: str = "plain", **changes: Any) -> Pair:
        """The tiny model of a configuration, written to `path` and loaded, with its twin."""
        return pair_of(path, self.write(path, name, **changes), context_tokens=CONTEXT_TOKENS)


def changed(
    path: Path,
    keys: Changes | None = None,
    tensors: Changes | None = None,
    architecture: str | None = None,
) -> Path:
    """A copy in the same folder with other keys, given without the architecture, tensors, or
    another name of the architecture."""
    target = path.with_name("changed.gguf")
    return rewrite(path, target, own_keys=keys, tensors=tensors, architecture=architecture)


def pair_of(path: Path, twin: Any, *, context_tokens: int | None = None) -> Pair:
    """A file of the tiny tokenizer's vocabulary, loaded, with its twin."""
    decoder = load_decoder(path, context_tokens=context_tokens)
    return Pair(decoder, twin, tiny_tokenizer().get_vocab_size())

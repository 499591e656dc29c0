"""Settings of a checkpoint's config.json, in old and new spellings."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from model_zoo.gguf.metadata import MAX_LAYERS
from model_zoo.layers.text_sizes import MAX_HEAD_DIM
from runtime.errors import ModelFileError

T = TypeVar("T")

_TEXT_PARTS = ("text_config", "llm_config", "language_config")
_SCALING_KINDS = ("rope_type", "type")
# Settings that are among the rope parameters in newer files and outside in older ones.
_BESIDE = ("rope_theta", "partial_rotary_factor")
# What functions of a table raise for settings of another type or value than they expect.
INVALID = (LookupError, TypeError, ValueError, ArithmeticError)


class Configuration:
    """The settings of the text model, or of another part of a multimodal model.

    `model`: for such a part, the settings of the whole model. All errors are ModelFileErrors that
    name the file.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        path: Path,
        model: "Configuration | None" = None,
    ) -> None:
        self.path = path
        self.whole = values
        self._model = model
        nested = [values[part] for part in _TEXT_PARTS if isinstance(values.get(part), Mapping)]
        self._text: Mapping[str, Any] = nested[0] if nested else values
        self._defaults: Mapping[str, Any] = {}
        self._spellings: Mapping[str, str] = {}

    @classmethod
    def read(cls, folder: Path) -> "Configuration":
        return cls(read_json(folder / "config.json"), path=folder / "config.json")

    @property
    def architectures(self) -> tuple[str, ...]:
        named = self.whole.get("architectures")
        if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
            return ()
        return tuple(named)

    def of_family(
        self, *, defaults: Mapping[str, Any], spellings: Mapping[str, str]
    ) -> "Configuration":
        """The same settings with a family's defaults and names.

        defaults: values of absent settings, common in multimodal models. spellings: alternative
        names of settings, by the usual names.
        """
        completed = Configuration(self.whole, path=self.path, model=self._model)
        completed._defaults, completed._spellings = defaults, spellings
        return completed

    def of_part(self, *names: str) -> "Configuration":
        """Only the settings under these names, one within the other, such as `vision_config`."""
        values: Any = self.whole
        for name in names:
            values = values.get(name)
            if not isinstance(values, Mapping):
                raise self.error(f"has no `{name}`, which this architecture needs")
        return Configuration(values, path=self.path, model=self)

    @property
    def model(self) -> "Configuration":
        """The settings of the model that this part belongs to."""
        assert self._model is not None
        return self._model

    def get(self, key: str, default: Any = None) -> Any:
        """The text model's value, else the whole model's, else the family's, else `default`."""
        for values in (self._text, self.whole, self._defaults):
            for name in (key, self._spellings.get(key)):
                if name is not None and values.get(name) is not None:
                    return values[name]
        return default

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise self.error(f"has no `{key}`, which this architecture needs")
        return value

    def require_size(self, key: str) -> int:
        value = self.require(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(f"has {str(value)[:80]!r} as `{key}`, not a whole number above 0")
        return value

    def derived(self, what: str, source: Callable[["Configuration"], T]) -> T:
        """`source(self)`; exceptions from invalid settings become an error that names `what`."""
        try:
            return source(self)
        except INVALID as error:
            raise self.error(f"does not determine `{what}`: {error!r}") from error

    def check(self, check: Callable[["Configuration"], None]) -> None:
        """Applies `check`; its exceptions from invalid settings become an error."""
        try:
            check(self)
        except INVALID as error:
            raise self.error(f"has invalid settings: {error!r}") from error

    def error(self, problem: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {problem}.")

    @property
    def layers(self) -> int:
        """As stated, or else the number of `layer_types`."""
        listed = self.get("layer_types")
        if self.get("num_hidden_layers") is None and isinstance(listed, list) and listed:
            layers = len(listed)
        else:
            layers = self.require_size("num_hidden_layers")
        if layers > MAX_LAYERS:
            raise self.error(f"has {layers:,} layers; {MAX_LAYERS:,} is the limit")
        return layers

    @property
    def head_dim(self) -> int:
        if self.get("head_dim") is not None:
            size = self.require_size("head_dim")
        else:
            size = self.require_size("hidden_size") // self.require_size("num_attention_heads")
        if size > MAX_HEAD_DIM:
            raise self.error(f"has heads of {size:,} elements; {MAX_HEAD_DIM:,} is the limit")
        return size

    @property
    def tied(self) -> bool:
        """Whether the head is tied to the embedding; the text model's setting has priority."""
        return bool(self.get("tie_word_embeddings", False))

    def rope(self, layer_type: str = "full_attention") -> Mapping[str, Any]:
        """The rotary parameters of layers of that type: rope_type, rope_theta and others.

        Older files have `rope_scaling` with `type`, and the other parameters beside it.
        """
        stated = self.get("rope_parameters") or self.get("rope_scaling") or {}
        if not isinstance(stated, Mapping):
            raise self.error("has rope parameters that are no object")
        if isinstance(stated.get(layer_type), Mapping):
            stated = stated[layer_type]
        found = {key: self.get(key) for key in _BESIDE if self.get(key) is not None}
        found |= {key: value for key, value in stated.items() if not isinstance(value, Mapping)}
        kinds = [found[key] for key in _SCALING_KINDS if found.get(key)]
        return {**found, "rope_type": kinds[0] if kinds else "default"}

    def layer_types(self) -> tuple[str, ...] | None:
        """`sliding_attention`, `full_attention` … of each layer, where the file lists them."""
        stated = self.get("layer_types")
        if stated is None:
            return None
        if not isinstance(stated, list) or len(stated) != self.layers:
            raise self.error(f"has `layer_types` that do not name its {self.layers} layers")
        return tuple(map(str, stated))


def read_json(path: Path) -> Mapping[str, Any]:
    """The object in a JSON file; ModelFileError if the file is missing or has no object."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: cannot be read as JSON: {error}.") from error
    if not isinstance(value, Mapping):
        raise ModelFileError(f"{path}: holds no JSON object.")
    return value


def read_text(path: Path) -> str:
    """ModelFileError if the file is missing, cannot be read, or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ModelFileError(f"{path}: there is no such file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{path}: cannot be read as text: {error}.") from error


def optional_json(path: Path) -> Mapping[str, Any]:
    """As `read_json`, but empty if the file does not exist."""
    return read_json(path) if path.exists() else {}

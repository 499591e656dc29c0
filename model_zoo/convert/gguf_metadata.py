"""Collects the metadata of a converted file: description, sizes, tokenizer and chat template."""

from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

from model_zoo.convert.configuration import Configuration
from model_zoo.convert.description import description
from model_zoo.convert.mapping import Conversion, Key
from model_zoo.convert.recipes import file_type, recipe_named
from model_zoo.convert.vocabularies.choice import tokenizer_keys
from model_zoo.convert.vocabularies.files import TokenizerFiles
from model_zoo.convert.writer import MetadataField, field, is_representable
from runtime.errors import ModelFileError

_GLOBAL = ("general.", "tokenizer.", "xielu.")
_LARGEST, _LARGEST_FLOAT = 1 << 32, 3.4e38


def metadata_of(
    conversion: Conversion, config: Configuration, *, flavour: str, recipe: str, rows: int
) -> Mapping[str, MetadataField]:
    """Full key names and values. `rows`: rows of the embedding; `recipe`: recipe of the weights."""
    folder = config.path.parent
    architecture = conversion.architecture_for(flavour, config)
    files = TokenizerFiles(folder, config)
    keys = {"general.architecture": architecture, **description(folder, files)}
    keys |= {"general.file_type": file_type(recipe), "general.quantization_version": 2}
    keys |= table_keys(conversion, config, flavour=flavour)
    keys |= tokenizer_keys(files, architecture=architecture, rows=rows, kind=conversion.tokenizer)
    return fields_of(keys, folder)


def projector_metadata(
    conversion: Conversion, config: Configuration, *, flavour: str, recipe: str
) -> Mapping[str, MetadataField]:
    """As `metadata_of`, for a file with only a vision model; `config`: the vision model's
    settings."""
    folder = config.path.parent
    files = TokenizerFiles(folder, config.model)
    architecture = conversion.architecture_for(flavour, config)
    keys = {"general.architecture": architecture, **description(folder, files)}
    keys["general.type"] = "mmproj"
    plain = recipe if recipe_named(recipe).plain else "f16"
    keys |= {"general.file_type": file_type(plain), "general.quantization_version": 2}
    keys |= table_keys(conversion, config, flavour=flavour)
    return fields_of(keys, folder)


def fields_of(keys: Mapping[str, Any], folder: Path) -> dict[str, MetadataField]:
    """The values with their types. ModelFileError if the files in `folder` state one that its type
    cannot represent."""
    fields = {name: field(value) for name, value in keys.items()}
    for name, found in fields.items():
        if not is_representable(found):
            raise ModelFileError(
                f"{folder}: states {str(found.value)[:80]} for `{name}`, whose type in GGUF, "
                f"{(found.element or found.type).name.lower()}, cannot represent it."
            )
    return fields


def table_keys(conversion: Conversion, config: Configuration, *, flavour: str) -> dict[str, Any]:
    """Full names and values of the table's keys."""
    architecture = conversion.architecture_for(flavour, config)
    keys = {}
    for key in conversion.keys:
        value = _value(key, config) if flavour in key.flavours else None
        if value is not None:
            keys[full_name(architecture, key.name)] = value
    return keys


def full_name(architecture: str, name: str) -> str:
    """The name of a key, which follows that of the architecture except in global keys."""
    return name if name.startswith(_GLOBAL) else f"{architecture}.{name}"


def _value(key: Key, config: Configuration) -> Any:
    """A number, a boolean, a list of these, texts of the table, or a value with the type that the
    table states; None omits the key."""
    source, of = key.source, key.of
    if callable(source):
        value = config.derived(key.name, source)
    else:
        value = config.get(source) if key.optional else config.require(source)
    if value is not None and of is not None:
        value = config.derived(key.name, lambda _: of(value))
    by_table = callable(source) and (_is_text(value) or isinstance(value, MetadataField))
    if value is None or by_table or _is_sound(value):
        return value
    raise config.error(f"has {str(value)[:80]!r} where a number is needed (`{key.name}`)")


def _is_text(value: Any) -> bool:
    """Whether it is a text or a list of texts."""
    listed = value if isinstance(value, list) else [value]
    return bool(listed) and all(isinstance(one, str) for one in listed)


def _is_sound(value: Any) -> bool:
    """Whether GGUF's number types can represent the value."""
    if isinstance(value, list):
        numbers = [one for one in value if one != -inf]  # an unused lower bound
        return bool(value) and all(not isinstance(one, list) and _is_sound(one) for one in numbers)
    if isinstance(value, float):
        return abs(value) < _LARGEST_FLOAT
    return isinstance(value, int) and 0 <= value < _LARGEST

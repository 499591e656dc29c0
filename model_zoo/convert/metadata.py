"""All metadata of a file to come: what the model is, its sizes, its tokenizer and template."""

from collections.abc import Mapping
from math import inf
from typing import Any

from model_zoo.convert.configuration import Configuration
from model_zoo.convert.description import description
from model_zoo.convert.mapping import Conversion, Key
from model_zoo.convert.recipes import file_type, recipe_named
from model_zoo.convert.vocabularies.choice import tokenizer_keys
from model_zoo.convert.vocabularies.files import TokenizerFiles
from model_zoo.convert.writer import Field, field

_GLOBAL = ("general.", "tokenizer.")
_LARGEST, _LARGEST_FLOAT = 1 << 32, 3.4e38


def metadata_of(
    conversion: Conversion, config: Configuration, *, flavour: str, recipe: str, rows: int
) -> Mapping[str, Field]:
    """Whole key names and values; `rows` of the embedding, `recipe` of the weights."""
    folder = config.path.parent
    architecture = conversion.architecture_for(flavour)
    files = TokenizerFiles(folder, config)
    keys = {"general.architecture": architecture, **description(folder, files)}
    keys |= {"general.file_type": file_type(recipe), "general.quantization_version": 2}
    keys |= table_keys(conversion, config, flavour=flavour)
    keys |= tokenizer_keys(files, architecture=architecture, rows=rows, kind=conversion.tokenizer)
    return {name: field(value) for name, value in keys.items()}


def projector_metadata(
    conversion: Conversion, config: Configuration, *, flavour: str, recipe: str
) -> Mapping[str, Field]:
    """The same for a file with the part that sees alone; `config` is of that part."""
    folder = config.path.parent
    files = TokenizerFiles(folder, config.model)
    architecture = conversion.architecture_for(flavour)
    keys = {"general.architecture": architecture, **description(folder, files)}
    keys["general.type"] = "mmproj"
    plain = recipe if recipe_named(recipe).plain else "f16"
    keys |= {"general.file_type": file_type(plain), "general.quantization_version": 2}
    keys |= table_keys(conversion, config, flavour=flavour)
    return {name: field(value) for name, value in keys.items()}


def table_keys(conversion: Conversion, config: Configuration, *, flavour: str) -> dict[str, Any]:
    """Whole names and values of the table's keys."""
    architecture = conversion.architecture_for(flavour)
    keys = {}
    for key in conversion.keys:
        value = _value(key, config) if flavour in key.flavours else None
        if value is not None:
            whole = key.name if key.name.startswith(_GLOBAL) else f"{architecture}.{key.name}"
            keys[whole] = value
    return keys


def _value(key: Key, config: Configuration) -> Any:
    """A number, a truth value or a list of such, or a table's own text; None: the file has none."""
    source, of = key.source, key.of
    if callable(source):
        value = config.told(key.name, source)
    else:
        value = config.get(source) if key.optional else config.require(source)
    if value is not None and of is not None:
        value = config.told(key.name, lambda _: of(value))
    if value is None or _is_sound(value) or (isinstance(value, str) and callable(source)):
        return value
    raise config.error(f"has {str(value)[:80]!r} where a number is needed (`{key.name}`)")


def _is_sound(value: Any) -> bool:
    """Whether the file's numbers can hold it."""
    if isinstance(value, list):
        numbers = [one for one in value if one != -inf]  # a bound that nothing falls below
        return bool(value) and all(not isinstance(one, list) and _is_sound(one) for one in numbers)
    if isinstance(value, float):
        return abs(value) < _LARGEST_FLOAT
    return isinstance(value, int) and 0 <= value < _LARGEST

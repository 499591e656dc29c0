"""All metadata of a file to come: what the model is, its sizes, its tokenizer and template."""

from collections.abc import Mapping
from typing import Any

from model_zoo.conversion.configuration import Configuration
from model_zoo.conversion.description import description
from model_zoo.conversion.mapping import Conversion, Key
from model_zoo.conversion.recipes import file_type
from model_zoo.conversion.vocabularies.choice import tokenizer_keys
from model_zoo.conversion.vocabularies.files import TokenizerFiles
from model_zoo.conversion.writer import Field, field

_GLOBAL = ("general.", "tokenizer.")
_LARGEST = 1 << 32


def metadata_of(
    conversion: Conversion, config: Configuration, *, flavour: str, recipe: str, rows: int
) -> Mapping[str, Field]:
    """Whole key names and values; `rows` of the embedding, `recipe` of the weights."""
    folder = config.path.parent
    architecture = conversion.architecture_for(flavour)
    files = TokenizerFiles(folder, config)
    keys = {"general.architecture": architecture, **description(folder, files)}
    keys |= {"general.file_type": file_type(recipe), "general.quantization_version": 2}
    for key in conversion.keys:
        value = _value(key, config) if flavour in key.flavours else None
        if value is not None:
            whole = key.name if key.name.startswith(_GLOBAL) else f"{architecture}.{key.name}"
            keys[whole] = value
    keys |= tokenizer_keys(files, architecture=architecture, rows=rows, kind=conversion.tokenizer)
    return {name: field(value) for name, value in keys.items()}


def _value(key: Key, config: Configuration) -> Any:
    """A number, a truth value or a list of such, or a table's own text; None: the file has none."""
    source, of = key.source, key.of
    if callable(source):
        value = config.told(key.name, source)
    else:
        value = config.get(source) if key.optional else config.require(source)
    if value is not None and of is not None:
        value = config.told(key.name, lambda _: of(value))
    for one in value if isinstance(value, list) else [value]:
        if one is None or isinstance(one, float) or (isinstance(one, int) and 0 <= one < _LARGEST):
            continue
        if isinstance(one, str) and callable(source):
            continue
        raise config.error(f"has {str(one)[:80]!r} where a number is needed (`{key.name}`)")
    return value

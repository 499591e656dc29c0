"""The types of values in errors, in the terms of JSON and YAML instead of Python's."""

from collections.abc import Mapping
from types import MappingProxyType

# What a value must be, by pydantic's name of the error that it is not.
REQUIRED_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "string_type": "a string",
        "bool_type": "a boolean",
        "bool_parsing": "a boolean",
        "int_type": "an integer",
        "int_parsing": "an integer",
        "int_from_float": "an integer",
        "float_type": "a number",
        "float_parsing": "a number",
        "list_type": "a list",
        "tuple_type": "a list",
        "dict_type": "an object",
        "model_type": "an object",
    }
)

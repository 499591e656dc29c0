"""Fields of requests that demand a form of the reply's text, as `OutputForm`."""

import json
from collections.abc import Mapping
from typing import Any

from model_zoo.grammars.constraint import OutputForm, OutputKind
from model_zoo.grammars.json_schema import check_references
from runtime.errors import RequestError
from serve_app.api.json_values import check_value, decoded_json

MAX_SCHEMA_BYTES = 128 * 1024
MAX_GRAMMAR_CHARACTERS = 64 * 1024
MAX_CHOICES = 1024

_JSON_OBJECT = {"type": "object"}
# vLLM's older fields and those of llama.cpp's server, with the kinds of form that they demand.
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "grammar": "gbnf",
    "json_schema": "json",
}
_STRUCTURED = ("json", "regex", "choice", "grammar", "json_object")
# Keys of `structured_outputs` that are refused unless they have these values.
_NEUTRAL = {
    "structural_tag": None,
    "whitespace_pattern": None,
    "disable_any_whitespace": False,
    "disable_additional_properties": False,
}


def json_form(field: str, schema: Any) -> OutputForm:
    """JSON text that follows `schema`. Raises RequestError for schemas over the limits and for
    references to other documents."""
    if not isinstance(schema, dict):
        raise RequestError(f'field "{field}" must be a JSON schema, an object')
    check_value(field, schema, max_bytes=MAX_SCHEMA_BYTES)
    check_references(field, schema)
    return OutputForm(OutputKind.JSON_SCHEMA, json.dumps(schema), field)


def ollama_form(value: Any) -> OutputForm | None:
    """The form that Ollama's field `format` demands: "json" or a schema."""
    if value in (None, ""):
        return None
    if value == "json":
        return json_form("format", _JSON_OBJECT)
    if not isinstance(value, dict):
        raise RequestError(
            f'invalid format: {json.dumps(value)[:80]}; expected "json" or a valid JSON Schema '
            "object"
        )
    return json_form("format", value)


def openai_form(
    response_format: Any, structured_outputs: Any, guided: Mapping[str, Any]
) -> OutputForm | None:
    """The form that OpenAI's field `response_format` or others' fields demand; `guided`: vLLM's
    older fields and llama.cpp's by name.

    Raises RequestError if more than one of them demands a form.
    """
    found = [
        _typed_form("response_format", response_format, nested=True),
        *_structured(structured_outputs),
    ]
    given = {name: value for name in _GUIDED if (value := guided.get(name)) is not None}
    found += [_form(name, _GUIDED[name], value) for name, value in given.items()]
    forms = [form for form in found if form is not None]
    if len(forms) > 1:
        raise RequestError(
            f'fields "{forms[0].field}" and "{forms[1].field}" both demand a form of the reply; '
            "give one of them"
        )
    return forms[0] if forms else None


def responses_form(value: Any, field: str = "text.format") -> OutputForm | None:
    """The form that `text.format` of OpenAI's responses demands, in the request or in an item."""
    return _typed_form(field, value, nested=False)


def schema_format(field: str, value: Any) -> OutputForm | None:
    """The form that Anthropic's field `output_config.format` demands, an object with a type and a
    schema."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind != "json_schema":
        raise RequestError(f'field "{field}.type" must be json_schema')
    return json_form(f"{field}.schema", value.get("schema"))


def grammar_text(field: str, value: Any) -> str:
    """The text of a grammar or a regular expression. Raises RequestError for other values."""
    if not isinstance(value, str) or not value:
        raise RequestError(f'field "{field}" must be a text that is not empty')
    if len(value) > MAX_GRAMMAR_CHARACTERS:
        raise RequestError(
            f'field "{field}" has {len(value):,} characters; at most {MAX_GRAMMAR_CHARACTERS:,} '
            "are accepted"
        )
    return value


def _typed_form(field: str, value: Any, *, nested: bool) -> OutputForm | None:
    """The form of an object with a type. `nested`: the schema is in an object `json_schema` instead
    of beside the type."""
    if value is None:
        return None
    match value.get("type") if isinstance(value, dict) else None:
        case "text":
            return None
        case "json_object" if value.get("schema") is not None:  # as in llama.cpp's server
            return json_form(f"{field}.schema", value["schema"] or _JSON_OBJECT)
        case "json_object":
            return json_form(field, _JSON_OBJECT)
        case "json_schema":
            if nested:
                field, value = f"{field}.json_schema", value.get("json_schema")
                if not isinstance(value, dict):
                    raise RequestError(f'field "{field}" must be an object')
            return json_form(f"{field}.schema", value.get("schema"))
    raise RequestError(f'field "{field}.type" must be text, json_object or json_schema')


def _structured(value: Any) -> list[OutputForm | None]:
    if value is None:
        return []
    if not isinstance(value, dict):
        raise RequestError('field "structured_outputs" must be an object')
    for name, item in value.items():
        place = f"structured_outputs.{name[:80]}"
        if name not in _STRUCTURED and name not in _NEUTRAL:
            raise RequestError(f'field "{place}" is not known')
        if item is not None and name in _NEUTRAL and item != _NEUTRAL[name]:
            raise RequestError(f'field "{place}" is not served')
    return [
        _form(f"structured_outputs.{name}", name, value[name])
        for name in _STRUCTURED
        if value.get(name) not in (None, False)
    ]


def _form(field: str, kind: str, value: Any) -> OutputForm:
    """The form that a field of vLLM or llama.cpp demands."""
    match kind:
        case "json":
            return json_form(field, _decoded(field, value) if isinstance(value, str) else value)
        case "json_object":
            return json_form(field, _JSON_OBJECT)
        case "regex":
            return OutputForm(OutputKind.REGEX, grammar_text(field, value), field)
        case "choice":
            return OutputForm(OutputKind.LARK, _choice(field, value), field)
    grammar = grammar_text(field, value)
    form = OutputKind.GBNF if kind == "gbnf" or "::=" in grammar else OutputKind.LARK
    return OutputForm(form, grammar, field)


def _decoded(field: str, text: str) -> Any:
    if len(text) > MAX_SCHEMA_BYTES:
        raise RequestError(f'field "{field}" has more than {MAX_SCHEMA_BYTES:,} characters')
    try:
        return decoded_json(text)
    except RequestError as error:
        raise RequestError(f'field "{field}" is a text that is not JSON; {error}') from None


def _choice(field: str, value: Any) -> str:
    """A grammar that allows exactly the texts of a list."""
    texts = value if isinstance(value, list) else []
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f'field "{field}" must be a list of texts that are not empty')
    if len(texts) > MAX_CHOICES:
        raise RequestError(f'field "{field}" has more than {MAX_CHOICES:,} items')
    options = (json.dumps(text, ensure_ascii=False) for text in texts)
    return grammar_text(field, f"start: {' | '.join(options)}")

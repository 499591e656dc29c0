"""The OpenAPI document, generated from the types that parse the requests."""

import math
import re
from collections.abc import Mapping
from functools import cache
from inspect import get_annotations
from typing import Any

import msgspec
from pydantic.json_schema import models_json_schema

from serve_app.api.auth import needs_no_key
from serve_app.api.fields import NEUTRAL
from serve_app.api.openapi_examples import PARAMETERS, reply_examples, request_examples
from serve_app.api.openapi_operations import (
    BINARY,
    JSON,
    OPERATIONS,
    OWN_GROUP,
    Operation,
    Protocol,
)
from serve_app.config.options import BOUNDS, LONGEST, OPENAI_BOUNDS, Bounds

_DESCRIPTION = (
    "Fields whose value is null count as absent. Unknown fields are ignored, unless the server has "
    "`strict_fields`. Content-Type is not checked. The examples are for the demo model; "
    "other models are named in its place."
)
NOT_SERVED = "Not served: only these values, which change nothing, are accepted."
_TEXT: dict[str, Any] = {"type": "string"}
_OBJECT: dict[str, Any] = {"type": "object"}
_ERRORS: Mapping[Protocol, dict[str, Any]] = {
    Protocol.OLLAMA: {
        "type": "object",
        "properties": {"error": _TEXT},
        "required": ["error"],
        "additionalProperties": False,
    },
    Protocol.OPENAI: {
        "type": "object",
        "properties": {
            "error": {
                "type": "object",
                "properties": {
                    "message": _TEXT,
                    "type": _TEXT,
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
                "required": ["message", "type", "param", "code"],
                "additionalProperties": False,
            }
        },
        "required": ["error"],
        "additionalProperties": False,
    },
    Protocol.ANTHROPIC: {
        "type": "object",
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "properties": {"type": _TEXT, "message": _TEXT},
                "required": ["type", "message"],
                "additionalProperties": False,
            },
            "request_id": _TEXT,
        },
        "required": ["type", "error", "request_id"],
        "additionalProperties": False,
    },
}
# Ranges of numbers that the endpoints check after parsing.
_BOUNDS: Mapping[Protocol, Mapping[str, Bounds]] = {
    Protocol.OLLAMA: {},
    Protocol.OPENAI: OPENAI_BOUNDS,
    Protocol.ANTHROPIC: {
        **{name: BOUNDS[name] for name in ("temperature", "top_p", "top_k")},
        "max_tokens": Bounds(int, 1, LONGEST),
    },
}
_PARAMETER = re.compile(r"\{(\w+)\}")


@cache
def encoded_document(version: str, *, keyed: bool) -> bytes:
    """The document as JSON."""
    return msgspec.json.encode(document(version, keyed=keyed))


def document(version: str, *, keyed: bool = False) -> dict[str, Any]:
    """An OpenAPI 3.1 document of all `OPERATIONS`. `keyed`: the server requires API keys."""
    schemas: dict[str, Any] = {_error_name(p): schema for p, schema in _ERRORS.items()}
    schemas["OllamaOptions"] = _options()
    paths: dict[str, dict[str, Any]] = {}
    for protocol in Protocol:
        own = [each for each in OPERATIONS if each.protocol is protocol]
        names = _add_schemas(schemas, protocol, own)
        for operation in own:
            described = _operation(operation, names)
            if keyed and needs_no_key(operation.path):
                described["security"] = []
            paths.setdefault(operation.path, {})[operation.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "Caravan", "version": version, "description": _DESCRIPTION},
        "tags": [{"name": name} for name in (*Protocol, OWN_GROUP)],
        "security": [*([] if keyed else [{}]), {"bearer": []}, {"header": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _add_schemas(
    schemas: dict[str, Any], protocol: Protocol, operations: list[Operation]
) -> dict[type, str]:
    """Adds the schemas of the protocol's bodies, whose names begin with its name. Returns the name
    of each body's schema.
    """
    bodies = [operation.body for operation in operations if operation.body is not None]
    found, definitions = models_json_schema(
        [(body, "validation") for body in bodies],
        ref_template=f"#/components/schemas/{protocol}{{model}}",
    )
    for name, schema in definitions.get("$defs", {}).items():
        schemas[f"{protocol}{name}"] = _refined(schema, protocol)
    names = {kind: schema["$ref"] for (kind, _), schema in found.items()}
    for kind, reference in names.items():
        schema = schemas[reference.rpartition("/")[2]]
        schema["properties"] = _readable(kind, schema["properties"])
    return names


def _readable(kind: type, properties: dict[str, Any]) -> dict[str, Any]:
    """The fields in the order of a reader's interest: the model, those of the type before those of
    its bases, which are additions to the protocol, and at the end those that are not served."""
    declared = [name for each in kind.__mro__ for name in get_annotations(each)]
    order = sorted(
        properties,
        key=lambda name: (
            properties[name].get("description") == NOT_SERVED,
            name != "model",
            declared.index(name) if name in declared else len(declared),
        ),
    )
    return {name: properties[name] for name in order}


def _refined(schema: dict[str, Any], protocol: Protocol) -> dict[str, Any]:
    """The schema of a body, with facts about its fields that its type does not express."""
    properties = {
        name: _field(name, field, protocol) for name, field in schema["properties"].items()
    }
    return {**schema, "properties": properties}


def _field(name: str, field: dict[str, Any], protocol: Protocol) -> dict[str, Any]:
    if NEUTRAL in field:
        return {"title": field["title"], "description": NOT_SERVED, "enum": field[NEUTRAL]}
    bounds = _BOUNDS[protocol].get(name)
    if bounds is not None and not {"type", "anyOf"} & field.keys():
        return field | _number(bounds)
    if name == "options" and protocol is Protocol.OLLAMA and field.get("type") == "object":
        return {"$ref": "#/components/schemas/OllamaOptions"}
    return field


def _options() -> dict[str, Any]:
    properties = {name: _number(bounds) for name, bounds in BOUNDS.items()}
    stop = {"type": ["array", "null"], "items": {"type": "string", "minLength": 1}}
    return {"type": "object", "properties": {**properties, "stop": stop}}


def _number(bounds: Bounds) -> dict[str, Any]:
    """The schema of a number within bounds."""
    kind = "integer" if bounds.type is int else "number"
    schema: dict[str, Any] = {"type": [kind, "null"]}
    if bounds.unlimited:
        schema["anyOf"] = [{"const": -1}, {"minimum": bounds.low}]
    elif bounds.low > -math.inf:
        schema["minimum"] = bounds.low
    if bounds.high < LONGEST:
        schema["maximum"] = bounds.high
    return schema


def _operation(operation: Operation, names: Mapping[type, str]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": "_".join(re.findall(r"\w+", f"{operation.method.lower()} {operation.path}")),
        "tags": [operation.group],
        "summary": operation.summary,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": _TEXT, **_example_of(name)}
            for name in _PARAMETER.findall(operation.path)
        ],
        "responses": _responses(operation),
    }
    if operation.body is not None:
        content = {"schema": {"$ref": names[operation.body]}, **request_examples(operation)}
        described["requestBody"] = {"required": True, "content": {JSON: content}}
    elif operation.uploads:
        described["requestBody"] = {"required": True, "content": {BINARY: {}}}
    return described


def _example_of(parameter: str) -> dict[str, Any]:
    return {"example": PARAMETERS[parameter]} if parameter in PARAMETERS else {}


def _responses(operation: Operation) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{_error_name(operation.protocol)}"}
    error: dict[str, Any] = {"description": "The reason"}
    if operation.method != "HEAD":
        error["content"] = {JSON: {"schema": schema}}
    success: dict[str, Any] = {"description": "Success"}
    if operation.media_types:
        success["content"] = {
            media: {
                "schema": _OBJECT if media == JSON else _TEXT,
                **reply_examples(operation, media),
            }
            for media in operation.media_types
        }
    return {"2XX": success, "4XX": error, "5XX": error}


def _error_name(protocol: Protocol) -> str:
    return f"{protocol}Error"

"""JSON Schemas of Kubernetes and KubeRay, without unknown keys."""

import json
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

KUBERNETES = "1.34"
DEFINITIONS = "https://kubernetes.io/api/_definitions.json"
KUBERAY = Path(__file__).parent / "kuberay.yaml"


def complaints(document: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a manifest, a line each."""
    schema = _schema(document)
    if schema is None:
        yield f"There is no {document['kind']} in {document['apiVersion']}."
        return
    registry = Registry().with_resource(DEFINITIONS, Resource.from_contents(_definitions()))
    validator = Draft202012Validator(schema, registry=registry)
    for error in validator.iter_errors(document):
        yield f"{error.json_path}: {error.message[:200]}"


def _schema(document: dict[str, Any]) -> dict[str, Any] | None:
    group, _, version = document["apiVersion"].rpartition("/")
    if (group, document["kind"]) == ("ray.io", "RayService"):
        return {"$ref": "#/$defs/RayService", "$defs": _kuberay()}
    for name, definition in _definitions()["$defs"].items():
        for kind in definition.get("x-kubernetes-group-version-kind", ()):
            if (kind["group"], kind["version"], kind["kind"]) == (group, version, document["kind"]):
                return {"$ref": f"{DEFINITIONS}#/$defs/{name}"}
    return None


@cache
def _definitions() -> dict[str, Any]:
    folder = files("kubernetes_validate") / "kubernetes-json-schema"
    text = (folder / f"v{KUBERNETES}.0-local-strict" / "_definitions.json").read_text()
    return json.loads(text)


@cache
def _kuberay() -> dict[str, Any]:
    return {name: _object(fields) for name, fields in yaml.safe_load(KUBERAY.read_text()).items()}


def _object(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {name.removesuffix("!"): _type(kind) for name, kind in fields.items()},
        "required": [name.removesuffix("!") for name in fields if name.endswith("!")],
    }


def _type(kind: Any) -> dict[str, Any]:
    match kind:
        case "string" | "integer" | "boolean":
            return {"type": kind}
        case "map":
            return {"type": "object", "additionalProperties": {"type": "string"}}
        case [item]:
            return {"type": "array", "items": _type(item)}
        case {"enum": values}:
            return {"enum": values}
        case str() if kind.startswith("k8s "):
            return {"$ref": f"{DEFINITIONS}#/$defs/{kind.removeprefix('k8s ')}"}
    return {"$ref": f"#/$defs/{kind}"}

"""Serve config files as Serve itself reads them, but without its tolerance for unknown keys."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from ray.serve import Application
from ray.serve.schema import ServeDeploySchema

from serve_app.app import build
from serve_app.check import IMPORT_PATH
from serve_app.cli.serve import environment
from tests.checkout import DEMO_MODEL

# What `caravan serve` sets for Ray's processes; who starts Ray otherwise has to set it too.
PROCESS_VARIABLES = {
    name: environment({}, 8000, Path("/f"))[name]
    for name in ("GOMP_SPINCOUNT", "RAY_worker_niceness")
}


def parsed(text: str) -> ServeDeploySchema:
    """AssertionError names keys that Serve would ignore."""
    config = yaml.safe_load(text)
    schema = ServeDeploySchema.model_validate(config)
    ignored = set(_keys(config)) - set(_keys(schema.model_dump(exclude_unset=True)))
    assert not ignored, f"Serve does not know {sorted(ignored)}"
    return schema


def arguments(schema: ServeDeploySchema) -> dict[str, Any]:
    """The arguments of the only application of the file."""
    (application,) = schema.applications
    assert application.import_path == IMPORT_PATH
    return application.args


def on_demo(args: dict[str, Any], *, vision_model: Path = DEMO_MODEL) -> dict[str, Any]:
    """The same with a model that is here in place of each one that would have to be pulled:
    `vision_model` where images are to be encoded, else the demo model."""
    args = copy.deepcopy(args)
    for model in args["models"]:
        if not Path(model["source"]).exists():
            model.pop("projector", None)
            source = vision_model if "vision" in model else DEMO_MODEL
            model |= {"source": str(source), "context_tokens": 512}
    return args


def deployments(args: dict[str, Any]) -> dict[str, Any]:
    """What `build` makes of these arguments: deployments by name, without a cluster."""
    return {deployment.name: deployment for deployment in _bound(build(args))}


def _bound(application: Application) -> Iterator[Any]:
    deployment = application._bound_deployment
    yield deployment
    for argument in (*deployment.init_args, *deployment.init_kwargs.values()):
        nested = argument.values() if isinstance(argument, dict) else [argument]
        for inner in nested:
            if isinstance(inner, Application):
                yield from _bound(inner)


def _keys(node: Any, path: str = "") -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield f"{path}.{key}"
            yield from _keys(value, f"{path}.{key}")
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            yield from _keys(value, f"{path}[{index}]")

"""The manifests of k8s/ and access to their parts."""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import yaml

from tests.checkout import ROOT

FOLDER = ROOT / "k8s"
Manifest = dict[str, Any]


@cache
def _documents() -> str:
    files = sorted(FOLDER.glob("*.yaml"))
    found = [document for path in files for document in yaml.safe_load_all(path.read_text())]
    return json.dumps(found)


def manifests() -> list[Manifest]:
    """Anew each time, so that a test may change what it has."""
    return json.loads(_documents())


def named(kind: str, name: str) -> Manifest:
    (found,) = [m for m in manifests() if (m["kind"], m["metadata"]["name"]) == (kind, name)]
    return found


def ray_service() -> Manifest:
    return named("RayService", "caravan")["spec"]


def groups(service: Manifest | None = None) -> dict[str, Manifest]:
    """The head's group, called `head`, and the workers', of this specification of a RayService, by
    default of the manifests'."""
    cluster = (service or ray_service())["rayClusterConfig"]
    workers = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    return {"head": cluster["headGroupSpec"], **workers}


def pod(group: Manifest) -> Manifest:
    return group["template"]["spec"]


def container(group: Manifest) -> Manifest:
    (only,) = pod(group)["containers"]
    return only


def pod_labels() -> dict[str, dict[str, str]]:
    """Of each kind of pod that comes of these manifests, with the labels that KubeRay adds."""
    labels = {}
    for name, group in groups().items():
        added = {
            "ray.io/is-ray-node": "yes",
            "ray.io/node-type": "head" if name == "head" else "worker",
            "ray.io/group": "headgroup" if name == "head" else name,
        }
        labels[name] = group["template"]["metadata"]["labels"] | added
    redis = named("StatefulSet", "caravan-redis")["spec"]["template"]
    return labels | {"redis": redis["metadata"]["labels"]}


def values(node: Any, key: str) -> Iterator[Any]:
    """All that stands under this key, wherever."""
    if isinstance(node, dict):
        for name, value in node.items():
            if name == key:
                yield value
            yield from values(value, key)
    elif isinstance(node, list):
        for item in node:
            yield from values(item, key)

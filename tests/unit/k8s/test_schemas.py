"""The manifests match the schemas of Kubernetes and KubeRay, which detect mistakes."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.k8s.manifests import Manifest, manifests, named
from tests.unit.k8s.schemas import complaints

# Whose keys mean something to those alone who write them.
FREE = {"labels", "limits", "matchLabels", "rayStartParams", "requests", "selector"}
Path = tuple[str | int, ...]


def identity(manifest: Manifest) -> str:
    return f"{manifest['kind']}-{manifest['metadata']['name']}"


def mappings(node: Any, path: Path = ()) -> Iterator[Path]:
    if isinstance(node, dict):
        yield path
    entries = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in entries:
        if isinstance(value, dict | list):
            yield from mappings(value, (*path, key))


def at(node: Any, path: Path) -> Any:
    for key in path:
        node = node[key]
    return node


@pytest.mark.parametrize("manifest", manifests(), ids=identity)
def test_each_manifest_matches_its_schema(manifest: Manifest):
    assert list(complaints(manifest)) == []


@pytest.mark.parametrize("manifest", manifests(), ids=identity)
def test_a_misspelt_key_is_detected_at_any_depth(manifest: Manifest):
    places = list(mappings(manifest))
    assert len(places) > 3
    unnoticed = set()
    for path in places:
        at(manifest, path)["misspelt"] = "1"
        if not list(complaints(manifest)):
            unnoticed.add(path[-1])
        del at(manifest, path)["misspelt"]
    assert unnoticed <= FREE


CLUSTER: Path = ("spec", "rayClusterConfig")
SLIPS = [
    ((*CLUSTER, "authOptions", "mode"), "tokens"),
    ((*CLUSTER, "autoscalerOptions", "upscalingMode"), "Fast"),
    ((*CLUSTER, "autoscalerOptions", "idleTimeoutSeconds"), "300"),
    ((*CLUSTER, "enableInTreeAutoscaling"), "true"),
    ((*CLUSTER, "headGroupSpec", "rayStartParams", "num-cpus"), 0),
    ((*CLUSTER, "workerGroupSpecs", 0, "maxReplicas"), "8"),
    ((*CLUSTER, "workerGroupSpecs", 0, "groupName"), None),
    ((*CLUSTER, "workerGroupSpecs", 1, "template", "spec", "containers", 0, "ports"), {}),
    (("spec", "upgradeStrategy", "type"), "Recreate"),
    (("spec", "serveConfigV2"), {"applications": []}),
    (("kind",), "RayServe"),
]


@pytest.mark.parametrize(("path", "value"), SLIPS, ids=lambda part: str(part)[-40:])
def test_an_invalid_value_is_detected(path: Path, value: Any):
    manifest = named("RayService", "caravan")
    at(manifest, path[:-1])[path[-1]] = value
    assert list(complaints(manifest))


@pytest.mark.parametrize("key", ["headGroupSpec", "workerGroupSpecs.groupName", "template"])
def test_a_missing_required_key_is_detected(key: str):
    manifest = named("RayService", "caravan")
    cluster = manifest["spec"]["rayClusterConfig"]
    worker = cluster["workerGroupSpecs"][0]
    del (cluster if key == "headGroupSpec" else worker)[key.rpartition(".")[2]]
    assert list(complaints(manifest))

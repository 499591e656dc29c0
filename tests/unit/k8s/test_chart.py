"""The Helm chart makes the objects of the manifests, and valid ones of other values."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from serve_app.config.settings import read_settings
from tests.serve_configs import arguments, parsed
from tests.unit.k8s.manifests import FOLDER, Manifest, groups, manifests, pod, values
from tests.unit.k8s.pod_files import check_haproxy
from tests.unit.k8s.schemas import complaints
from tools.helm import HELM

CHART = FOLDER / "helm" / "caravan"
Values = dict[str, Any]


@pytest.fixture(scope="module")
def helm() -> str:
    found = shutil.which("helm") or (str(HELM) if HELM.exists() else None)
    if found is None:
        pytest.skip("helm is not installed: python -m tools.helm")
    return found


def run(helm: str, tmp_path: Path, changed: Values) -> subprocess.CompletedProcess[str]:
    given = tmp_path / "values.yaml"
    given.write_text(yaml.safe_dump(changed))
    command = [helm, "template", "caravan", str(CHART), "--values", str(given)]
    return subprocess.run(command, capture_output=True, text=True)


def rendered(helm: str, tmp_path: Path, changed: Values) -> dict[tuple[str, str], Manifest]:
    done = run(helm, tmp_path, changed)
    assert done.returncode == 0, done.stderr
    return by_name(document for document in yaml.safe_load_all(done.stdout) if document)


def by_name(documents: Any) -> dict[tuple[str, str], Manifest]:
    """With the Serve config as a value, so that its layout does not matter."""
    named = {}
    for document in documents:
        if document["kind"] == "RayService":
            spec = document["spec"]
            named["ServeConfig", ""] = yaml.safe_load(spec["serveConfigV2"])
            spec = spec | {"serveConfigV2": ""}
            document = document | {"spec": spec}
        named[document["kind"], document["metadata"]["name"]] = document
    return named


def gpu_pod(objects: dict[tuple[str, str], Manifest]) -> Manifest:
    return pod(groups(objects["RayService", "caravan"]["spec"])["gpu"])


def test_the_defaults_make_the_manifests(helm: str, tmp_path: Path):
    made = rendered(helm, tmp_path, {})
    claim = made["PersistentVolumeClaim", "caravan-models"]["metadata"]
    assert claim.pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert made == by_name(manifests())


DEMO = {"name": "demo", "source": "models/demo.gguf", "device": "cpu", "max_sequences": 33554432}
CHANGES: dict[str, Values] = {
    "images": {"image": {"cpu": "a/b@sha256:" + "0" * 64, "cuda": "a/c:1", "redis": "a/d:1"}},
    "cpu": {"gpu": {"gpus": 0, "cpu": 7.5}, "models": [DEMO]},
    "gpus": {"gpu": {"gpus": 4, "minReplicas": 0, "nodeSelector": {"gpu": "l4"}}},
    "storage": {
        "storage": {"storageClass": "nfs", "size": "1Ti"},
        "redis": {"storageClass": "ssd"},
    },
    "no keys": {"args": {"api_keys_file": None, "allowed_hosts": ["llm.example.org"]}},
    "secrets": {"secrets": {"keys": "k", "proxy": "p", "redis": "r", "rayToken": "t", "hub": "h"}},
    "exposed": {
        "ingress": {
            "host": "llm.example.org",
            "className": "nginx",
            "tlsSecret": "llm-tls",
            "annotations": {"nginx.ingress.kubernetes.io/proxy-buffering": "off"},
        }
    },
    "no args": {"args": {"api_keys_file": None, "start_timeout_s": None}},
    "on demand": {"models": [], "args": {"on_demand": {}}},
    "texts like other values": {
        "image": {"cpu": "1", "cuda": "2.0", "redis": "true"},
        "head": {"memory": "8000000000"},
        "ingress": {
            "host": "llm.example.org",
            "className": "123",
            "tlsSecret": "true",
            "annotations": {"a": "on"},
        },
        "gpu": {"nodeSelector": {"gpu": "true"}},
        "storage": {"storageClass": "true", "size": "200"},
        "redis": {"storageClass": "123"},
        "secrets": {"keys": "1", "proxy": "2", "redis": "3", "rayToken": "null", "hub": "no"},
    },
    "no policies": {"networkPolicies": {"enabled": False}},
    "api server": {"networkPolicies": {"apiServer": ["10.1.2.3/32"]}},
    "clients": {
        "networkPolicies": {
            "clients": [
                {"ipBlock": {"cidr": "10.1.0.0/16", "except": ["10.1.2.0/24"]}},
                {"namespaceSelector": {"matchLabels": {"team": "true"}}, "podSelector": {}},
            ]
        }
    },
}


@pytest.mark.parametrize("changed", CHANGES.values(), ids=CHANGES)
def test_other_values_make_valid_objects(helm: str, tmp_path: Path, changed: Values):
    done = run(helm, tmp_path, changed)
    assert done.returncode == 0, done.stderr
    documents = [document for document in yaml.safe_load_all(done.stdout) if document]
    assert [problem for each in documents for problem in complaints(each)] == []
    (service,) = (each for each in documents if each["kind"] == "RayService")
    args = arguments(parsed(service["spec"]["serveConfigV2"]))
    read_settings(args)
    assert args["models"] == changed.get("models", args["models"])
    assert by_name(documents) != by_name(manifests())


def test_haproxy_accepts_the_folders_of_its_files(helm: str, tmp_path: Path):
    made = rendered(helm, tmp_path, CHANGES["cpu"])
    for name, group in groups(made["RayService", "caravan"]["spec"]).items():
        check_haproxy(group, tmp_path / name)


def test_pods_without_gpus_need_none(helm: str, tmp_path: Path):
    pod = gpu_pod(rendered(helm, tmp_path, CHANGES["cpu"]))
    (container,) = pod["containers"]
    assert "tolerations" not in pod and "cuda" not in container["image"]
    assert container["resources"]["limits"] == {"cpu": "7.5", "memory": "24Gi"}
    assert {"name": "home", "emptyDir": {}} in pod["volumes"], "it has copies of weights"


def test_values_reach_their_objects(helm: str, tmp_path: Path):
    pod = gpu_pod(rendered(helm, tmp_path, CHANGES["gpus"]))
    assert pod["nodeSelector"] == {"gpu": "l4"}
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "4"
    stored = rendered(helm, tmp_path, CHANGES["storage"])
    assert stored["PersistentVolumeClaim", "caravan-models"]["spec"]["storageClassName"] == "nfs"
    assert set(values(stored["StatefulSet", "caravan-redis"], "storageClassName")) == {"ssd"}
    exposed = rendered(helm, tmp_path, CHANGES["exposed"])["Ingress", "caravan"]["spec"]
    assert exposed["tls"] == [{"hosts": ["llm.example.org"], "secretName": "llm-tls"}]
    kinds = {kind for kind, _ in rendered(helm, tmp_path, CHANGES["no policies"])}
    assert "NetworkPolicy" not in kinds and "PodDisruptionBudget" in kinds
    policy = rendered(helm, tmp_path, CHANGES["clients"])["NetworkPolicy", "caravan-ray"]["spec"]
    (peers,) = (rule["from"] for rule in policy["ingress"] if rule.get("ports") == [{"port": 8000}])
    assert peers[2:] == CHANGES["clients"]["networkPolicies"]["clients"]
    secrets = rendered(helm, tmp_path, CHANGES["secrets"])
    used = {reference["name"] for reference in values(list(secrets.values()), "secretKeyRef")}
    assert used == {"p", "r"}
    assert set(values(list(secrets.values()), "secretName")) == {"k", "r", "t"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"gpu": {"gpu": 1}}, "gpu"),
        ({"ingress": {"replicas": 1}}, "replicas"),
        ({"ingress": {"replicas": 3, "maxReplicas": 3}}, "ingress.maxReplicas"),
        ({"gpu": {"minReplicas": 2, "maxReplicas": 1}}, "gpu.maxReplicas"),
        ({"ingress": {"host": "llm.example.org"}}, "ingress.tlsSecret"),
        ({"args": {"models": []}}, "models"),
        ({"networkPolicies": {"clients": [{"cidr": "10.1.0.0/16"}]}}, "clients"),
        ({"models": []}, "args.on_demand"),
        ({"models": [], "args": {"on_demand": None}}, "args.on_demand"),
        ({"gpu": {"minReplicas": 0, "maxReplicas": 0}}, "maxReplicas"),
        ({"gpu": {"nodeSelector": {"gpu": True}}}, "nodeSelector"),
        ({"gpu": {"memory": "24Gi # x"}}, "memory"),
        ({"ingress": {"annotations": {"a": True}}}, "annotations"),
        ({"image": {"cuda": "a: b"}}, "cuda"),
        ({"storage": {"storageClass": "-"}}, "storageClass"),
        ({"secrets": {"keys": ""}}, "keys"),
    ],
)
def test_invalid_values_are_refused(helm: str, tmp_path: Path, changed: Values, message: str):
    done = run(helm, tmp_path, changed)
    assert done.returncode != 0 and message in done.stderr


def test_helm_finds_no_mistake_in_the_chart(helm: str):
    done = subprocess.run([helm, "lint", "--strict", str(CHART)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_defaults_match_the_schema_of_the_values():
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.validate(yaml.safe_load((CHART / "values.yaml").read_text()), schema)

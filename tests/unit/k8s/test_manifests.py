"""What one manifest says of another is true, and nobody has more rights than needed."""

import re
from pathlib import PurePosixPath

from tests.serve_configs import ROOT, parsed
from tests.unit.k8s.manifests import (
    FOLDER,
    container,
    groups,
    manifests,
    named,
    pod,
    pod_labels,
    ray_service,
    values,
)


def selected(labels: dict[str, str]) -> set[str]:
    """The kinds of pods that have all these labels."""
    return {name for name, has in pod_labels().items() if labels.items() <= has.items()}


def test_clients_reach_the_pods_of_the_ingress_alone():
    service = named("Service", "caravan")["spec"]
    assert selected(service["selector"]) == {"ingress"}
    (port,) = service["ports"]
    ports = {p["name"]: p["containerPort"] for p in container(groups()["ingress"])["ports"]}
    assert ports[port["targetPort"]] == parsed(ray_service()["serveConfigV2"]).http_options.port


def test_probes_ask_where_something_listens():
    http_port = parsed(ray_service()["serveConfigV2"]).http_options.port
    for name, group in groups().items():
        ready = container(group)["readinessProbe"]["httpGet"]
        alive = container(group)["livenessProbe"]["httpGet"]
        assert alive == {"path": "/api/healthz", "port": 52365}
        assert ready == (alive if name == "head" else {"path": "/-/healthz", "port": http_port})


def test_the_claims_and_the_redis_that_pods_name_are_there():
    claims = {m["metadata"]["name"] for m in manifests() if m["kind"] == "PersistentVolumeClaim"}
    assert set(values(manifests(), "claimName")) == claims
    address = ray_service()["rayClusterConfig"]["gcsFaultToleranceOptions"]["redisAddress"]
    host, _, port = address.partition(":")
    service = named("Service", host)["spec"]
    assert [p["port"] for p in service["ports"]] == [int(port)]
    assert selected(service["selector"]) == {"redis"}


def test_the_secrets_that_pods_need_are_in_the_readme_and_in_no_manifest():
    assert not [m for m in manifests() if m["kind"] == "Secret"]
    wanted = {reference["name"] for reference in values(manifests(), "secretKeyRef")}
    wanted |= set(values(manifests(), "secretName"))
    made = re.findall(r"create secret generic (\S+)", (FOLDER / "README.md").read_text())
    assert wanted == set(made)


def test_policies_are_about_pods_that_exist():
    budget = named("PodDisruptionBudget", "caravan-ingress")["spec"]
    assert selected(budget["selector"]["matchLabels"]) == {"ingress"}
    assert budget["minAvailable"] < groups()["ingress"]["minReplicas"]
    ray = named("NetworkPolicy", "caravan-ray")["spec"]
    assert selected(ray["podSelector"]["matchLabels"]) == {"head", "ingress", "gpu"}
    among_themselves = ray["ingress"][0]
    assert "ports" not in among_themselves
    assert among_themselves["from"] == [{"podSelector": ray["podSelector"]}]
    redis = named("NetworkPolicy", "caravan-redis")["spec"]
    assert selected(redis["podSelector"]["matchLabels"]) == {"redis"}


def test_no_pod_runs_as_root_or_may_become_it():
    pods = [
        *map(pod, groups().values()),
        named("StatefulSet", "caravan-redis")["spec"]["template"]["spec"],
    ]
    for spec in pods:
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        for one in spec["containers"]:
            assert one["securityContext"]["allowPrivilegeEscalation"] is False
            assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_pods_never_restart_in_place_under_the_autoscaler():
    """KubeRay refuses another policy with version 2 of the autoscaler."""
    assert ray_service()["rayClusterConfig"]["autoscalerOptions"]["version"] == "v2"
    assert {pod(group).get("restartPolicy", "Never") for group in groups().values()} == {"Never"}


def test_only_gpu_pods_write_models():
    writers = {
        name
        for name, group in groups().items()
        for mount in container(group)["volumeMounts"]
        if mount["name"] == "models" and not mount.get("readOnly")
    }
    assert writers == {"gpu"}


def test_the_image_is_made_of_files_that_are_there():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    dockerfile = (FOLDER / "Dockerfile").read_text()
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile, flags=re.MULTILINE)
    sources = {source for line in copied for source in line.split()}
    assert sources == kept
    assert [source for source in sources if not (ROOT / PurePosixPath(source)).exists()] == []


def test_the_image_runs_as_the_user_that_the_pods_name():
    dockerfile = (FOLDER / "Dockerfile").read_text()
    (user,) = re.findall(r"^USER (\d+)$", dockerfile, flags=re.MULTILINE)
    assert {pod(group)["securityContext"]["runAsUser"] for group in groups().values()} == {
        int(user)
    }

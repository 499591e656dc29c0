"""The manifests refer to each other correctly and grant least privileges."""

import json
import re
from pathlib import Path, PurePosixPath

import pytest

from serve_app.api.auth import OPEN_PATHS
from serve_app.config.settings import read_settings
from tests.checkout import ROOT
from tests.serve_configs import arguments, parsed
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
from tests.unit.k8s.pod_files import check_haproxy


def readme() -> str:
    return (FOLDER / "README.md").read_text()


def selected(labels: dict[str, str]) -> set[str]:
    """The kinds of pods with all these labels."""
    return {name for name, has in pod_labels().items() if labels.items() <= has.items()}


def test_clients_reach_only_the_ingress_pods():
    service = named("Service", "caravan")["spec"]
    assert selected(service["selector"]) == {"ingress"}
    (port,) = service["ports"]
    ports = {p["name"]: p["containerPort"] for p in container(groups()["ingress"])["ports"]}
    assert ports[port["targetPort"]] == parsed(ray_service()["serveConfigV2"]).http_options.port


def test_probes_use_ports_that_are_open():
    http_port = parsed(ray_service()["serveConfigV2"]).http_options.port
    for name, group in groups().items():
        ready = container(group)["readinessProbe"]["httpGet"]
        alive = container(group)["livenessProbe"]["httpGet"]
        assert alive == {"path": "/api/healthz", "port": 52365}
        assert ready == (alive if name == "head" else {"path": "/-/healthz", "port": http_port})


def test_ingress_pods_wait_for_the_start_of_the_models_and_for_nothing_later():
    """A readiness probe that depended on models would end the service with one of them."""
    probes = {name: container(group).get("startupProbe") for name, group in groups().items()}
    started = probes.pop("ingress")
    assert started["httpGet"]["path"] == "/readyz" and not any(probes.values())
    assert started["httpGet"]["path"] in OPEN_PATHS, "kubelets have no key"
    settings = read_settings(arguments(parsed(ray_service()["serveConfigV2"])))
    restart_s = started["failureThreshold"] * started["periodSeconds"]
    assert restart_s > 10 * settings.start_timeout_s


def test_the_claims_and_the_redis_of_the_pods_exist():
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
    wanted |= {reference["name"] for reference in values(manifests(), "secretRef")}
    wanted |= set(values(manifests(), "secretName"))
    made = re.findall(r"create secret generic (\S+)", readme())
    assert wanted == set(made)


def test_the_command_for_numbers_of_pods_matches_the_manifests():
    (patch,) = re.findall(r"--type json -p '(.*?)'", readme(), flags=re.DOTALL)
    test, replaced = json.loads(patch)
    workers = ray_service()["rayClusterConfig"]["workerGroupSpecs"]
    found = {}
    for operation in (test, replaced):
        _, spec, groups_key, number, field = operation["path"].split("/")
        assert (spec, groups_key) == ("spec", "workerGroupSpecs")
        found[operation["op"]] = workers[int(number)][field]
    assert found["test"] == test["value"] == "gpu"
    assert type(found["replace"]) is type(replaced["value"]) is int
    assert workers[0]["groupName"] == "ingress" and "Group `ingress` is number 0" in readme()


def test_policies_select_existing_pods():
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


def test_only_pods_that_pull_models_have_the_hub_token():
    for name, group in groups().items():
        has = "caravan-hub" in {ref["name"] for ref in values(group, "secretRef")}
        assert has == (name in writers())
        assert "HF_TOKEN" not in {entry["name"] for entry in container(group)["env"]}
    assert "create secret generic caravan-hub --from-literal=HF_TOKEN=" in readme()


def test_the_redis_password_is_in_no_argument():
    spec = named("StatefulSet", "caravan-redis")["spec"]["template"]["spec"]
    (redis,) = spec["containers"]
    assert not list(values(redis, "secretKeyRef")) and "$(" not in " ".join(redis["args"])
    (volume,) = spec["volumes"]
    (item,) = volume["secret"]["items"]
    (mount,) = [m for m in redis["volumeMounts"] if m["name"] == volume["name"]]
    assert f"{mount['mountPath']}/{item['path']}" == redis["args"][1]
    assert f'--from-literal={item["key"]}="requirepass ' in readme()


def egress(pod_name: str) -> list[dict]:
    """The egress rules of a kind of pod; AssertionError if no policy limits it."""
    rules, limited = [], False
    for policy in (m["spec"] for m in manifests() if m["kind"] == "NetworkPolicy"):
        if pod_name in selected_by(policy["podSelector"]) and "Egress" in policy["policyTypes"]:
            limited = True
            rules += policy.get("egress", [])
    assert limited, pod_name
    return rules


def selected_by(selector: dict) -> set[str]:
    chosen = selected(selector.get("matchLabels", {}))
    for expression in selector.get("matchExpressions", []):
        assert expression["operator"] == "In"
        key, wanted = expression["key"], expression["values"]
        chosen = {name for name in chosen if pod_labels()[name].get(key) in wanted}
    return chosen


def test_pods_reach_only_each_other_dns_and_required_addresses():
    redis = {"matchLabels": pod_labels()["redis"]}
    for name in pod_labels():
        rules = egress(name)
        peers = [peer for rule in rules for peer in rule["to"]]
        public = [rule for rule in rules if "0.0.0.0/0" in set(values(rule, "cidr"))]
        assert bool(public) == (name in writers()), "models are pulled where they are written"
        for rule in public:
            assert [port["port"] for port in rule["ports"]] == [443]
            forbidden = {block for blocks in values(rule, "except") for block in blocks}
            assert {"169.254.0.0/16", "10.0.0.0/8", "fc00::/7"} <= forbidden
        assert ({"podSelector": redis} in peers) == (name == "head")
        dns = [rule for rule in rules if {"port": 53, "protocol": "UDP"} in rule.get("ports", [])]
        assert bool(dns) == (name != "redis")
    assert egress("redis") == []


def test_clients_and_prometheus_reach_only_their_ports():
    rules = named("NetworkPolicy", "caravan-ray")["spec"]["ingress"]
    outside = {
        label: [port["port"] for port in rule["ports"]]
        for rule in rules
        for peer in rule["from"]
        for label in peer.get("namespaceSelector", {}).get("matchLabels", {})
    }
    assert outside == {"caravan-clients": [8000], "caravan-metrics": [8080]}
    ports = {port["name"]: port["containerPort"] for port in container(groups()["gpu"])["ports"]}
    assert ports == {"serve": 8000, "metrics": 8080}
    for label in outside:
        assert f"`{label}=allowed`" in readme()


def all_pods() -> list[dict]:
    redis = named("StatefulSet", "caravan-redis")["spec"]["template"]["spec"]
    return [*map(pod, groups().values()), redis]


def test_no_pod_runs_as_root_or_may_escalate():
    for spec in all_pods():
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for one in spec["containers"]:
            assert one["securityContext"]["allowPrivilegeEscalation"] is False
            assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_containers_write_only_to_volumes():
    autoscaler = ray_service()["rayClusterConfig"]["autoscalerOptions"]
    for one in [autoscaler, *(one for spec in all_pods() for one in spec["containers"])]:
        assert one["securityContext"]["readOnlyRootFilesystem"] is True
    for group in groups().values():
        volumes = {volume["name"]: volume for volume in pod(group)["volumes"]}
        writable = {
            mount["mountPath"]
            for mount in container(group)["volumeMounts"]
            if "emptyDir" in volumes[mount["name"]]
        }
        assert writable == {"/tmp", "/home/caravan", "/dev/shm"}
    head = {volume["name"] for volume in pod(groups()["head"])["volumes"]}
    assert {mount["name"] for mount in autoscaler["volumeMounts"]} <= head


@pytest.mark.parametrize("name", groups())
def test_haproxy_accepts_the_folders_of_its_files(name: str, tmp_path: Path):
    check_haproxy(groups()[name], tmp_path)


def test_pods_never_restart_in_place_under_the_autoscaler():
    """KubeRay refuses another policy with version 2 of the autoscaler."""
    assert ray_service()["rayClusterConfig"]["autoscalerOptions"]["version"] == "v2"
    assert {pod(group).get("restartPolicy", "Never") for group in groups().values()} == {"Never"}


def writers() -> set[str]:
    """The kinds of pods that write to the store of models."""
    return {
        name
        for name, group in groups().items()
        for mount in container(group)["volumeMounts"]
        if mount["name"] == "models" and not mount.get("readOnly")
    }


def test_only_gpu_pods_write_models():
    assert writers() == {"gpu"}


def test_the_dockerfile_copies_existing_files():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    dockerfile = (FOLDER / "Dockerfile").read_text()
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile, flags=re.MULTILINE)
    sources = {source for line in copied for source in line.split()}
    assert sources == kept
    assert [source for source in sources if not (ROOT / PurePosixPath(source)).exists()] == []


def test_the_image_runs_as_the_user_of_the_pods():
    dockerfile = (FOLDER / "Dockerfile").read_text()
    (user,) = re.findall(r"^USER (\d+)$", dockerfile, flags=re.MULTILINE)
    assert {pod(group)["securityContext"]["runAsUser"] for group in groups().values()} == {
        int(user)
    }

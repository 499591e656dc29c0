"""The application inside the RayService: it builds, and its replicas fit the pods."""

import json
import re
from pathlib import PurePosixPath

import pytest
from packaging.requirements import Requirement

from serve_app.config.settings import deployment_name, read_settings
from serve_app.transport.stream_server import DRAIN_S
from tests.checkout import ROOT
from tests.serve_configs import PROCESS_VARIABLES, arguments, deployments, on_demo, parsed
from tests.unit.k8s.manifests import container, groups, pod, ray_service
from tests.unit.serve_app.cli.cli_runs import run

HAPROXY = (
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S",
    "RAY_SERVE_HAPROXY_CLOSE_SPREAD_TIME_S",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S",
)


@pytest.fixture(autouse=True)
def an_empty_store(monkeypatch, tmp_path):
    monkeypatch.setenv("CARAVAN_MODELS", str(tmp_path))


@pytest.fixture
def schema():
    return parsed(ray_service()["serveConfigV2"])


@pytest.fixture
def mounted_keys(tmp_path, schema):
    """Puts a file in place of the one of the Secret, with the mode that Kubernetes gives it."""
    path = tmp_path / "keys.yaml"
    path.write_text(run("key", "new", "alice").stdout)
    path.chmod(0o440)
    arguments(schema)["api_keys_file"] = str(path)


def test_the_application_builds(schema, mounted_keys):
    args = arguments(schema)
    models = {deployment_name(model.name) for model in read_settings(args).models}
    assert models | {"Ingress"} <= set(deployments(args))
    assert models | {"Ingress"} <= set(deployments(on_demo(args)))


def test_the_api_keys_are_mounted_in_all_pods(schema):
    file = PurePosixPath(arguments(schema)["api_keys_file"])
    assert f"--from-file={file.name}" in (ROOT / "k8s" / "README.md").read_text()
    for group in groups().values():
        mounts = {mount["mountPath"]: mount for mount in container(group)["volumeMounts"]}
        mount = mounts[str(file.parent)]
        assert mount["readOnly"] is True
        volumes = {volume["name"]: volume for volume in pod(group)["volumes"]}
        assert volumes[mount["name"]]["secret"]["secretName"] == "caravan-keys"
        assert volumes[mount["name"]]["secret"]["defaultMode"] & 0o027 == 0


def test_configured_deployments_exist(schema, mounted_keys):
    (application,) = schema.applications
    named = {deployment.name for deployment in application.deployments}
    assert named and named <= set(deployments(application.args))


def test_the_ingress_fits_only_its_pods(schema):
    (application,) = schema.applications
    (ingress,) = [d for d in application.deployments if d.name == "Ingress"]
    wanted = ingress.ray_actor_options.resources["ingress"]
    offered = {
        name: json.loads(json.loads(group["rayStartParams"].get("resources", '"{}"')))
        for name, group in groups().items()
    }
    assert {name for name, has in offered.items() if has.get("ingress", 0) >= wanted} == {"ingress"}
    group = groups()["ingress"]
    assert ingress.ray_actor_options.num_cpus <= float(group["rayStartParams"]["num-cpus"])
    settings = read_settings(application.args)
    assert group["minReplicas"] == settings.ingress_replicas
    assert group["maxReplicas"] >= 2 * settings.ingress_replicas, "new ones start beside old ones"


def test_each_model_replica_fits_a_gpu_pod(schema):
    limits = container(groups()["gpu"])["resources"]["limits"]
    replicas = 0
    for model in read_settings(arguments(schema)).models:
        assert model.device == "cuda"
        assert model.num_gpus == float(limits["nvidia.com/gpu"])
        assert model.num_cpus <= float(limits["cpu"])
        replicas += model.autoscaling.max_replicas if model.autoscaling else model.replicas or 1
    assert replicas <= groups()["gpu"]["maxReplicas"]


def test_no_model_fits_a_pod_that_cannot_pull_it():
    for name, group in groups().items():
        models = {mount["name"]: mount for mount in container(group)["volumeMounts"]}["models"]
        offered = group["rayStartParams"].get("num-cpus")
        assert offered == ("0" if models.get("readOnly") else None), name


def test_pods_wait_until_replicas_are_drained():
    for name in ("ingress", "gpu"):
        group = groups()[name]
        command = container(group)["lifecycle"]["preStop"]["exec"]["command"][-1]
        deadline = int(re.search(r"--deadline-remaining-seconds (\d+)", command)[1])
        sleep = int(re.search(r"sleep (\d+)", command)[1])
        environment = {entry["name"]: entry.get("value") for entry in container(group)["env"]}
        drain = float(environment["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"])
        assert max(drain, DRAIN_S) < sleep <= deadline
        assert sleep < pod(group)["terminationGracePeriodSeconds"]


def test_the_ray_version_is_the_installed_one():
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    found = [Requirement(line) for line in pins if line.startswith("ray==")]
    assert str(found[0].specifier) == f"=={ray_service()['rayClusterConfig']['rayVersion']}"


def test_all_pods_have_the_same_serve_environment():
    config = parsed((ROOT / "configs" / "quickstart.yaml").read_text())
    quickstart = config.controller_options.runtime_env["env_vars"]
    for group in groups().values():
        environment = {entry["name"]: entry.get("value") for entry in container(group)["env"]}
        assert environment["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
        assert environment == environment | PROCESS_VARIABLES
        assert environment["RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD"] == "0"
        for name in HAPROXY:
            assert environment[name] == quickstart[name], "as elsewhere"
        mounts = {mount["mountPath"]: mount for mount in container(group)["volumeMounts"]}
        assert environment["CARAVAN_MODELS"] in mounts

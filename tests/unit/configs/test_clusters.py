"""The files for `ray up` are accepted by Ray, and their nodes suit the Serve config beside them."""

import copy
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from packaging.requirements import Requirement
from ray.autoscaler._private.resource_demand_scheduler import (
    _default_utilization_scorer,
    get_nodes_for,
)
from ray.autoscaler._private.util import prepare_config, validate_config

from serve_app.config.settings import ModelSettings, read_settings
from tests.checkout import ROOT
from tests.serve_configs import PROCESS_VARIABLES, arguments, parsed

FOLDER = ROOT / "configs" / "clusters"
CLUSTERS = sorted(FOLDER.glob("*.yaml"))
HOME = "/home/ubuntu/"
COMMANDS = (
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
)

each_cluster = pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)


def cluster(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def model() -> ModelSettings:
    (only,) = read_settings(arguments(parsed((ROOT / "configs/cloud.yaml").read_text()))).models
    return only


def nodes_for(config: dict[str, Any], demands: list[dict[str, float]]) -> dict[str, int]:
    """The nodes that Ray's autoscaler adds; AssertionError if they do not suffice."""
    added, unmet = get_nodes_for(
        config["available_node_types"],
        {config["head_node_type"]: 1},
        config["head_node_type"],
        config["max_workers"],
        demands,
        lambda *given: _default_utilization_scorer(*given, node_availability_summary=None),
    )
    assert not unmet
    return dict(added)


def test_there_is_a_file_for_each_cloud():
    assert [path.stem for path in CLUSTERS] == ["aws", "gcp"]
    assert [cluster(path)["provider"]["type"] for path in CLUSTERS] == ["aws", "gcp"]


@each_cluster
def test_ray_accepts_the_cluster(path: Path):
    config = cluster(path)
    validate_config(prepare_config(copy.deepcopy(config)))
    for where in (config, config["auth"], config["available_node_types"]["gpu"]):
        where["misspelt"] = "1"
        with pytest.raises(jsonschema.ValidationError, match="misspelt"):
            validate_config(prepare_config(copy.deepcopy(config)))
        del where["misspelt"]


@each_cluster
def test_each_replica_needs_one_gpu_node_and_idle_ones_go(path: Path):
    config = prepare_config(cluster(path))
    assert all(node["min_workers"] == 0 for node in config["available_node_types"].values())
    assert config["available_node_types"][config["head_node_type"]]["max_workers"] == 0
    wanted = model()
    assert wanted.autoscaling
    replica = {"CPU": wanted.num_cpus or 1.0, "GPU": wanted.num_gpus or 0.0}
    for count in range(1, wanted.autoscaling.max_replicas + 1):
        assert nodes_for(config, [replica] * count) == {"gpu": count}


def test_boot_disks_are_of_the_cluster_s_zone_and_of_a_type_that_g2_machines_support():
    config = cluster(FOLDER / "gcp.yaml")
    zone = config["provider"]["availability_zone"]
    for node in config["available_node_types"].values():
        (disk,) = node["node_config"]["disks"]
        kind = disk["initializeParams"]["diskType"]
        assert kind == f"zones/{zone}/diskTypes/pd-balanced"


@each_cluster
def test_shells_can_parse_all_commands(path: Path):
    config = cluster(path)
    commands = [command for key in COMMANDS for command in config[key]]
    assert len(commands) > 8
    for command in commands:
        subprocess.run(["bash", "-n", "-c", command], check=True)


@each_cluster
def test_mounted_files_exist_or_are_made_as_the_file_says(path: Path):
    text = path.read_text()
    for remote, local in cluster(path)["file_mounts"].items():
        assert remote.startswith(HOME)
        made = {"dist": "`make package`", "~/.caravan/secrets": "~/.caravan/secrets/ray_token"}
        assert made[local] in text if local in made else (ROOT / local).exists()


@each_cluster
def test_commands_use_only_what_is_mounted_or_made(path: Path):
    config = cluster(path)
    known = {remote.removeprefix(HOME) for remote in config["file_mounts"]} | {"caravan/venv"}
    commands = "\n".join(command for key in COMMANDS for command in config[key])
    used = set(re.findall(r"~/(caravan/[\w.-]+)", commands))
    assert used == known


@each_cluster
def test_secrets_are_files_of_the_operator(path: Path):
    text = path.read_text()
    assert not re.search(r"[0-9a-f]{32}", text)
    assert "TOKEN" not in text and "SECRET" not in text
    for name in ("ray_token", "proxy_secret"):
        assert f"openssl rand -hex 32 > ~/.caravan/secrets/{name}" in text


@each_cluster
def test_clients_of_the_clouds_are_pinned(path: Path):
    (command,) = cluster(path)["head_setup_commands"]
    packages = command.partition("install ")[2].split()
    assert packages
    assert all(str(Requirement(package).specifier).startswith("==") for package in packages)
    assert f"pip install {' '.join(packages)}\n" in path.read_text().partition("cluster_name")[0]


def test_nodes_have_the_environment_of_the_servers(tmp_path: Path):
    secrets = tmp_path / "caravan" / "secrets"
    secrets.mkdir(parents=True)
    (secrets / "proxy_secret").write_text("a" * 64 + "\n")
    activate = tmp_path / "caravan" / "venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.touch()
    script = f"set -eu; . {FOLDER / 'environment.sh'}; env"
    shell = subprocess.run(
        ["bash", "-c", script],
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    variables = dict(line.split("=", 1) for line in shell.stdout.splitlines())
    assert variables["CARAVAN_PROXY_SECRET"] == "a" * 64
    assert variables["RAY_AUTH_MODE"] == "token"
    assert variables["RAY_AUTH_TOKEN_PATH"] == str(secrets / "ray_token")
    assert variables["RAY_SERVE_HAPROXY_BINARY_PATH"].endswith("/venv/bin/caravan-haproxy")
    assert variables["CARAVAN_MODELS"] == str(tmp_path / "caravan" / "models")
    assert "OMP_NUM_THREADS" not in variables
    assert variables == variables | PROCESS_VARIABLES


def test_the_page_exports_the_environment_of_the_servers():
    page = (ROOT / "docs" / "cluster.md").read_text()
    exported = dict(re.findall(r"^export (\w+)=(\S+)$", page, re.MULTILINE))
    assert exported == exported | PROCESS_VARIABLES

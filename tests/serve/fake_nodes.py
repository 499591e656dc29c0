"""A Ray cluster in this machine whose autoscaler adds and removes nodes, by Ray's fake provider."""

import ctypes
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from tests.checkout import ROOT
from tests.loopback import free_port
from tests.patience import HANG_S
from tests.serve.nodes import STORE

PR_SET_CHILD_SUBREAPER = 36


def cluster_environment() -> dict[str, str]:
    """The environment of the process that drives the cluster."""
    return {
        "RAY_FAKE_CLUSTER": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        # A busy machine is no reason to replace a node, or to refuse requests for want of a place.
        "AUTOSCALER_HEARTBEAT_TIMEOUT_S": "600",
        "RAY_SERVE_SLOW_STARTUP_WARNING_S": "600",
        # All nodes listen on loopback, which Ray does by itself on other systems than Linux.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # Whatever token the user of this machine has for other clusters.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }


@contextmanager
def autoscaled_cluster(
    folder: Path, *, cpus: int, gpus: int, most_workers: int, variables: Mapping[str, str]
) -> Iterator[None]:
    """This process drives it; it has been started with `cluster_environment()`. `cpus`,
    `gpus`: of the head and of each worker node. `folder`: for Ray's files. `variables`: of the
    environment of all nodes. In the end all processes are ended that this one has started, directly
    or not."""
    adopt_descendants()
    port = free_port()
    config = folder / "autoscaler.json"
    each = {"CPU": cpus, "GPU": gpus}
    config.write_text(json.dumps(_config(f"127.0.0.1:{port}", each, most_workers)))
    try:
        _start_head(port, config, folder, each, variables)
        ray.init(address=f"127.0.0.1:{port}", log_to_driver=False)
        yield
    finally:
        ray.shutdown()
        end_descendants()


def _start_head(
    port: int, config: Path, folder: Path, resources: dict[str, int], variables: Mapping[str, str]
) -> None:
    started = subprocess.run(
        [
            Path(sys.executable).parent / "ray",
            *("start", "--head", f"--port={port}", "--node-ip-address=127.0.0.1"),
            *(
                f"--autoscaling-config={config}",
                f"--temp-dir={folder}",
                "--include-dashboard=false",
                "--include-log-monitor=false",
            ),
            *(f"--num-cpus={resources['CPU']}", f"--num-gpus={resources['GPU']}"),
            *(f"--ray-client-server-port={free_port()}", "--dashboard-agent-listen-port=0"),
            f"--object-store-memory={STORE['object_store_memory']}",
        ],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert started.returncode == 0, f"{started.stdout}\n{started.stderr}"


def _config(address: str, resources: dict[str, int], most_workers: int) -> dict[str, Any]:
    """A file of `ray up` (ray/autoscaler/ray-schema.json)."""
    lists = (
        *("cluster_synced_files", "rsync_exclude", "rsync_filter", "initialization_commands"),
        *("setup_commands", "head_setup_commands", "worker_setup_commands"),
        *("head_start_ray_commands", "worker_start_ray_commands"),
    )
    worker = {**resources, **STORE}
    return {
        "cluster_name": "fake",
        "max_workers": most_workers,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 0.1,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": address,
            # Nodes with one address are told apart, and need no commands to be run on them.
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "auth": {},
        "available_node_types": {
            "ray.head.default": {"resources": resources, "node_config": {}, "max_workers": 0},
            "worker": {
                "resources": worker,
                "node_config": {},
                "min_workers": 0,
                "max_workers": most_workers,
            },
        },
        "head_node_type": "ray.head.default",
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        **{name: [] for name in lists},
    }


def adopt_descendants() -> None:
    """Processes whose parents have ended become children of this one, rather than of init."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def end_descendants() -> None:
    """Send SIGTERM to all descendants, then SIGKILL to those that do not end."""
    deadline = time.monotonic() + HANG_S
    how = signal.SIGTERM
    while pids := _descendants():
        for pid in pids:
            _end(pid, how)
        time.sleep(2.0 if how is signal.SIGTERM else 0.1)
        how = signal.SIGKILL
        assert time.monotonic() < deadline, f"these processes do not end: {pids}"


def _end(pid: int, how: signal.Signals) -> None:
    try:
        os.kill(pid, how)
        os.waitpid(pid, os.WNOHANG)  # otherwise it would stay in the list as a zombie
    except (ProcessLookupError, ChildProcessError):
        pass


def _descendants() -> list[int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # After the command's name, which is in brackets: the state, and the parent.
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found, new = set(), {os.getpid()}
    while new := {pid for pid, parent in parents.items() if parent in new} - found:
        found |= new
    return sorted(found)

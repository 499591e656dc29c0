"""The folders that containers write to, with the modes that Kubernetes gives them."""

from dataclasses import replace
from pathlib import Path

from ray.serve._private import constants
from ray.serve._private.haproxy import HAProxyApi

from serve_app.haproxy import PATH_VARIABLES, secure
from tests.unit.k8s.manifests import Manifest, container, pod
from tests.unit.serve_app.proxy_configs import LONGEST_SOCKET_PATH, proxy_config, sockets_beside

NODE_ID = "0" * 56


def check_haproxy(group: Manifest, root: Path) -> None:
    """Starts as much of HAProxy as writes files, with the folders of a pod below `root`.
    UnsafeError if they are not safe."""
    make_folders(group, root)
    paths = haproxy_paths(group)
    _, admin, _, _, metrics = paths
    for path in (admin, metrics, *sockets_beside(admin)):
        assert len(str(path)) <= LONGEST_SOCKET_PATH, path
    config, admin, state_base, state_file, metrics = (root / str(path)[1:] for path in paths)
    generated = replace(
        proxy_config(config.parent),
        socket_path=str(admin),
        server_state_base=str(state_base),
        server_state_file=str(state_file),
        metrics_socket_path=str(metrics),
    )
    HAProxyApi(generated, config_file_path=str(config))._generate_config_file_internal()
    secure(config)


def make_folders(group: Manifest, root: Path) -> None:
    """The emptyDirs of a pod, below `root`. The kubelet gives those on disks mode 0777, without the
    sticky bit, and a tmpfs has its file system's 1777; `fsGroup` adds the setgid bit."""
    assert pod(group)["securityContext"]["fsGroup"]
    volumes = {volume["name"]: volume for volume in pod(group)["volumes"]}
    for mount in container(group)["volumeMounts"]:
        if (source := volumes[mount["name"]].get("emptyDir")) is not None:
            folder = root / mount["mountPath"][1:]
            folder.mkdir(parents=True)
            folder.chmod(0o3777 if source.get("medium") == "Memory" else 0o2777)


def haproxy_paths(group: Manifest) -> list[Path]:
    """In the order of PATH_VARIABLES, with the node's id where Ray puts it."""
    environment = {entry["name"]: entry.get("value") for entry in container(group)["env"]}
    paths = []
    for name in PATH_VARIABLES:
        path = Path(environment.get(name, getattr(constants, name)))
        paths.append(
            path / NODE_ID if name.endswith("_BASE") else path.parent / NODE_ID / path.name
        )
    return paths

"""Ray's configuration of HAProxy, with loopback as the frontend's address."""

from pathlib import Path

from ray.serve._private.haproxy import HAProxyConfig
from ray.serve.config import HTTPOptions

from tests.loopback import free_port


def proxy_config(directory: Path) -> HAProxyConfig:
    """All of its files are in the directory."""
    return HAProxyConfig(
        http_options=HTTPOptions(host="127.0.0.1", port=free_port()),
        socket_path=str(directory / "admin.sock"),
        metrics_socket_path=str(directory / "metrics.sock"),
        server_state_base=str(directory),
        server_state_file=str(directory / "state"),
        stats_port=free_port(),
        metrics_port=free_port(),
        maxconn=40,
    )

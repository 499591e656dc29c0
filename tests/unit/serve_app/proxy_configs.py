"""Ray's configuration of HAProxy, by default with loopback as the frontend's address, and its
sockets."""

from pathlib import Path

from ray.serve._private.haproxy import HAProxyConfig
from ray.serve.config import HTTPOptions

from serve_app.haproxy_supervisor import SupervisorFiles
from tests.loopback import free_port

HIGHEST_PID = 4194304
# HAProxy creates a socket at PATH.PID.tmp and renames it; Unix allows 107 characters.
LONGEST_SOCKET_PATH = 107 - len(f".{HIGHEST_PID}.tmp")


def proxy_config(directory: Path, host: str = "127.0.0.1") -> HAProxyConfig:
    """All of its files are in the directory."""
    return HAProxyConfig(
        http_options=HTTPOptions(host=host, port=free_port()),
        socket_path=str(directory / "admin.sock"),
        metrics_socket_path=str(directory / "metrics.sock"),
        server_state_base=str(directory),
        server_state_file=str(directory / "state"),
        stats_port=free_port(),
        metrics_port=free_port(),
        maxconn=40,
    )


def sockets_beside(admin: Path) -> tuple[Path, Path]:
    """The supervisor's sockets with their longest paths, if this is the path of Ray's socket."""
    files = SupervisorFiles(admin.with_name("haproxy.cfg"), admin, HIGHEST_PID)
    return files.own_admin, files.unused

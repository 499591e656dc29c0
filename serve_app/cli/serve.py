"""`caravan serve`: starts Ray Serve with models, and shows what matters of its output."""

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click
import yaml

from model_zoo.sources.reference import is_path
from model_zoo.sources.resolve import stored_model
from model_zoo.store.store import Store, default_root
from runtime.errors import ConfigurationError, SourceError
from serve_app.check import (
    IMPORT_PATH,
    HttpOptions,
    application_arguments,
    check,
    check_port,
    checked_environment,
    http_options,
    read_config,
)
from serve_app.child_process import begin_server
from serve_app.cli.completion import stored_models
from serve_app.cli.log_file import LogWriter, log_path
from serve_app.cli.pull import pull_one
from serve_app.cli.ray_folders import haproxy_folder, ray_folder, ray_token
from serve_app.cli.ray_serve import CODE
from serve_app.cli.serve_output import StartReport
from serve_app.cli.shared_options import without_models
from serve_app.cli.terminal import harmless
from serve_app.config.model_sources import named_source
from serve_app.config.settings import read_settings
from serve_app.haproxy import (
    BINARY_VARIABLE,
    COMMAND,
    CONFIG_VARIABLE,
    IPV6_VARIABLE,
    SECRET_VARIABLE,
)
from serve_app.temporary_folders import temporary_folder

# Ray's default would be the working directory.
_CODE = ("--app-dir", CODE)
_CONFIG_SUFFIXES = (".yaml", ".yml")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
# Variables that every configuration needs for HAProxy; configs/quickstart.yaml explains them.
SERVE_ENVIRONMENT = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
    "RAY_SERVE_HAPROXY_CLOSE_SPREAD_TIME_S": "10",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
}
_SECRET_BYTES = 32
_NO_NAME = re.compile(r"[^A-Za-z0-9_.\-]+")
# How often a thread of the CPU kernels looks for work before it sleeps. OpenMP's own 300,000 takes
# the processor from other processes and slows replicas beside them down.
_SPIN_COUNT = "1000"
# Ports besides that of the server, with Ray's defaults, which the server at the default port has.
_DEFAULT_PORT = 8000
_INNER_PORTS = {
    "RAY_SERVE_HAPROXY_STATS_PORT": 8404,
    "RAY_SERVE_HAPROXY_METRICS_PORT": 9101,
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 8500,
}
# Servers at other ports use a block of _INNER_BLOCK ports that depends on the server's port, below
# the ports that Ray's ingresses and the kernel choose. Ray opens them many seconds after they are
# chosen, and meanwhile another starting server must not choose the same.
_FIRST_INNER_PORT, _INNER_BLOCK, _INNER_BLOCKS = 20_000, 4, 2_500
# Ray's default of 15 puts replicas behind all else on the machine, also behind Ray's own processes
# that start.
_NICENESS = "0"


@click.command(
    epilog="""\b
Examples:
  caravan serve
  caravan serve models/demo.gguf
  caravan serve llama3.2:1b --context 8192
  caravan serve hf://org/repo:Q4_K_M --listen 0.0.0.0 --port 8080
  caravan serve configs/laptop.yaml --verbose
"""
)
@click.argument(
    "models",
    nargs=-1,
    metavar="[MODEL...|CONFIG]",
    shell_complete=stored_models,
)
@click.option("--port", type=click.IntRange(1, 65535), help="Default: 8000.")
@click.option("--listen", metavar="ADDRESS", help="Default: 127.0.0.1; 0.0.0.0 for all.")
@click.option("--context", type=click.IntRange(1), help="Tokens of a conversation.")
@click.option("--verbose", is_flag=True, help="Show all of Ray's output.")
def serve(models: tuple[str, ...], verbose: bool, **given: Any) -> None:
    """Serve models: files, names of models, hf:// sources, or a configuration.

    A name such as llama3.2:1b is that of a model in the store, or else in Ollama's registry, from
    which it is pulled first. Without arguments, all models of the store are loaded when they are
    requested, and unloaded when their memory is needed.

    It starts a Ray of its own, unless RAY_ADDRESS names a cluster. Ctrl-C ends everything that was
    started. For Ray's own commands, such as `serve status`, set
    RAY_AUTH_MODE=token in another terminal.
    """
    with _config_file(models, given) as path:
        for note in check(path):
            click.echo(harmless(note), err=True)
        _check_port(http_options(read_config(path)))
        status = _serve(path, verbose=verbose)
    raise click.exceptions.Exit(status)


def config_of(
    models: Sequence[str], given: Mapping[str, Any], store: Store, own: Mapping[str, str]
) -> dict[str, Any]:
    """A configuration of Serve for files and names of models, which are pulled if the store lacks
    them; without any, for all models of the store, on demand. `own`: the environment. Raises
    SourceError or StoreError."""
    context = {} if given["context"] is None else {"context_tokens": given["context"]}
    # In a Ray of its own nothing else needs reserved processors, and models may outnumber them.
    resources = {} if _names_cluster(own) else {"num_cpus": 0}
    served = [
        {
            "name": served_name(model),
            "source": _available_source(model, store),
            **context,
            **resources,
        }
        for model in models
    ]
    args: dict[str, Any] = {"models": served} if served else {"on_demand": {"model": context}}
    return {
        "proxy_location": "HeadOnly",
        "http_options": _given_address(given).model_dump(),
        "controller_options": {"runtime_env": {"env_vars": dict(SERVE_ENVIRONMENT)}},
        "applications": [
            {
                "name": "caravan",
                "route_prefix": "/",
                "import_path": IMPORT_PATH,
                "args": args,
            }
        ],
    }


def environment(own: Mapping[str, str], port: int, files: Path) -> dict[str, str]:
    """For Serve's processes; what `own` sets stays. `port`: of the server; `files`: a folder of
    HAProxy's, as `haproxy_folder` makes it."""
    inner = _inner_ports(port).items()
    ports = {name: str(_free_port(port)) for name, port in inner if name not in own}
    made = {
        BINARY_VARIABLE: str(_haproxy_command()),
        CONFIG_VARIABLE: f"{files}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{files}/admin.sock",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{files}/metrics.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(files),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{files}/server-state",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Lines of loading progress differ in their numbers only; Ray would fold them into one.
        "RAY_DEDUP_LOGS": "0",
        "GOMP_SPINCOUNT": _SPIN_COUNT,
        "RAY_worker_niceness": _NICENESS,
        "PYTHONSAFEPATH": "1",  # no modules of the working directory, as in `ray_serve`
        SECRET_VARIABLE: secrets.token_hex(_SECRET_BYTES),
    }
    return {**made, **ports, **own, **_without_proxies(own)}


def _haproxy_command() -> Path:
    """It is beside Python, as in virtual environments, or where `caravan` itself is."""
    beside_python = Path(sys.executable).with_name(COMMAND)
    user = Path(sysconfig.get_path("scripts", f"{os.name}_user"), COMMAND)
    places = (beside_python, Path(sys.argv[0]).resolve().with_name(COMMAND), user)
    return next((place for place in places if place.exists()), beside_python)


def _without_proxies(own: Mapping[str, str]) -> dict[str, str]:
    """Variables with which processes of this machine reach each other where a proxy is set."""
    if not any(name.lower() in _PROXIES for name in own):
        return {}
    stated = own.get("no_proxy") or own.get("NO_PROXY") or ""
    hosts = ",".join(filter(None, (stated, "localhost", "127.0.0.1", _address_of_this_machine())))
    return {"no_proxy": hosts, "NO_PROXY": hosts}


def _address_of_this_machine() -> str | None:
    """The address from which packets to other networks would come, by which Ray knows this node;
    None without such a network. Nothing is sent."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return probe.getsockname()[0]
    return None


def _inner_ports(port: int) -> Mapping[str, int]:
    """The ports, by variable, that a server at this port prefers."""
    if port == _DEFAULT_PORT:
        return _INNER_PORTS
    first = _FIRST_INNER_PORT + port % _INNER_BLOCKS * _INNER_BLOCK
    others = (each for each in range(first, first + _INNER_BLOCK) if each != port)
    return dict(zip(_INNER_PORTS, others, strict=False))


def _free_port(preferred: int) -> int:
    """A port of 127.0.0.1 on which nothing listens."""
    for port in (preferred, 0):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)) as probe:
            return probe.getsockname()[1]
    raise ConfigurationError("No port of 127.0.0.1 is free.")


def _serve(path: Path, *, verbose: bool) -> int:
    """Run Serve until it ends; its exit status."""
    own = dict(os.environ)
    http = http_options(read_config(path))
    log = log_path(own, http.port)
    report = StartReport(address=_address(http), models=_expected(path), log=log, verbose=verbose)
    own_variables = {}
    if not _names_cluster(own):
        own_variables = {"RAY_TMPDIR": str(ray_folder(own)), **ray_token(own)}
    if http.host == "::":
        own_variables[IPV6_VARIABLE] = "1"
    with (
        LogWriter(log, report.warn) as writer,
        run_arguments(path, own) as (arguments, variables),
        haproxy_folder() as files,
    ):
        if not writer.exists:
            report.log = None
        made = environment({**own, **own_variables}, http.port, files)
        server = subprocess.Popen(
            [sys.executable, "-P", "-m", "serve_app.cli.ray_serve", "run", *_CODE, *arguments],
            env={**made, **variables, **checked_environment(path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,  # Ctrl-C reaches this process only, which passes it on
            preexec_fn=begin_server,
        )

        def stop(number: int, frame: object) -> None:
            report.stopping()
            server.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

        signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGTERM, stop)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup sets it
            signal.signal(signal.SIGHUP, stop)
        with report:
            _follow(server, writer, report)
        status = server.wait()
    if report.is_stopping:
        return 0
    report.ended(status)
    return max(status, 1)


@contextmanager
def run_arguments(
    path: Path, own: Mapping[str, str]
) -> Iterator[tuple[Sequence[str | Path], Mapping[str, str]]]:
    """Arguments of `serve run` that name Ray and the configuration, and the variables of Ray's
    processes that the configuration states.

    `serve run` starts a Ray of its own, even beside one that runs here, unless `RAY_ADDRESS` names
    one. The variables are those of its nodes: from a `runtime_env`, Ray starts Python and imports
    itself in each process only to set them.
    """
    if _names_cluster(own):
        yield [path], {}
        return
    config = dict(read_config(path))
    variables = _variables(config.pop("controller_options", None))
    if variables is None:
        yield ["--address", "local", path], {}
        return
    with temporary_folder("caravan-") as folder:
        written = folder / path.name
        written.write_text(yaml.safe_dump(config))
        yield ["--address", "local", written], variables


def _names_cluster(own: Mapping[str, str]) -> bool:
    """Whether the models are served by a Ray that runs already, here or on other machines."""
    return bool(own.get("RAY_ADDRESS"))


def _variables(controller_options: Any) -> Mapping[str, str] | None:
    """The environment in Serve's `controller_options`; None if there is something else in them, or
    a variable that refers to others, which Ray resolves where the process starts."""
    match controller_options:
        case {"runtime_env": {"env_vars": dict(variables), **other}, **more} if not (other or more):
            texts = {name: value for name, value in variables.items() if isinstance(value, str)}
            if len(texts) == len(variables) and not any("$" in text for text in texts.values()):
                return texts
    return None


def _follow(server: subprocess.Popen[bytes], log: LogWriter, report: StartReport) -> None:
    """Read the server's output to its end. A server that cannot start is stopped."""
    assert server.stdout is not None
    stopped = False
    for line in server.stdout:
        log.write(line)
        report.read(line.decode(errors="replace"))
        if report.failed and not stopped:
            stopped = True
            server.send_signal(signal.SIGINT)


@contextmanager
def _config_file(models: Sequence[str], given: Mapping[str, Any]) -> Iterator[Path]:
    """The configuration that is named, or a temporary one."""
    configs = [model for model in models if model.endswith(_CONFIG_SUFFIXES)]
    if configs:
        if len(models) > 1 or any(value is not None for value in given.values()):
            raise click.UsageError("A configuration excludes other models and options.")
        yield Path(configs[0])
        return
    with temporary_folder("caravan-") as folder:
        path = folder / "config.yaml"
        store = Store(default_root(os.environ))
        _check_port(_given_address(given))  # before models are pulled
        if not models and not store.names():
            click.echo(f"{without_models(store)}; `caravan pull` adds models.", err=True)
        config = config_of(models, given, store, os.environ)
        path.write_text(yaml.safe_dump(config))
        yield path


def _check_port(http: HttpOptions) -> None:
    """As `check_port`, where the port is one of this machine and not in use by Serve itself."""
    if not _names_cluster(os.environ):
        check_port(http)


def _given_address(given: Mapping[str, Any]) -> HttpOptions:
    return HttpOptions(host=given["listen"] or "127.0.0.1", port=given["port"] or _DEFAULT_PORT)


def _available_source(text: str, store: Store) -> str:
    """The source of a file or of a model in the store, which is pulled there if it is missing."""
    if is_path(text):
        return text
    source = named_source(text, store)
    if stored_model(source, store) is None:
        try:
            pull_one(source, store, as_json=False)
        except SourceError as error:
            raise SourceError(f"{error} Nor is there a file {text}.") from error
    return str(source)


def served_name(source: str) -> str:
    """The name of a source in requests: of a file its stem, with a hyphen for characters that names
    do not have, of a repository its last part, of a registry with a port too; else what the user
    wrote."""
    if is_path(source) or source.lower().endswith(".gguf"):
        return _NO_NAME.sub("-", Path(source).stem).strip("-.") or "model"
    before, _, last = source.partition("@")[0].rpartition("/")
    return last if ":" in before else source


def _address(http: HttpOptions) -> str:
    is_local = http.host in ("0.0.0.0", "127.0.0.1", "::")
    shown = f"[{http.host}]" if ":" in http.host else http.host
    return f"http://{'localhost' if is_local else shown}:{http.port}"


def _expected(path: Path) -> frozenset[str]:
    """The models of which a replica starts at once."""
    config = read_config(path)
    return frozenset(
        model.name
        for args in application_arguments(config)
        for model in read_settings(args).models
        if model.autoscaling is None or model.autoscaling.min_replicas
    )

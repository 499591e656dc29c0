"""`caravan serve`: the configuration that it makes, and the lines of Serve's output that it
shows."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from model_zoo.store.store import Store
from runtime.errors import SourceError
from serve_app.check import check
from serve_app.cli.log_file import log_path
from serve_app.cli.serve import (
    SERVE_ENVIRONMENT,
    config_of,
    run_arguments,
    served_name,
)
from serve_app.cli.serve_output import StartReport
from serve_app.config.model_sources import named_source
from serve_app.config.settings import read_settings
from tests.checkout import ROOT
from tests.loopback import free_port
from tests.unit.serve_app.cli.cli_runs import put, run

DEMO = "models/demo.gguf"
NOTHING = {"port": None, "listen": None, "context": None}
REPLICA = "\x1b[36m(ServeReplica:caravan:demo pid=13276)\x1b[0m "
READY = [
    "2026-11-23 14:31:23,139\tINFO scripts.py:489 -- Running config file: 'x.yaml'.",
    "(ServeController pid=1) INFO controller 1 -- Importing and building app 'caravan'.",
    "(ServeReplica:caravan:Ingress pid=2) INFO x -- Started HTTP server on port 30000",
    REPLICA + '{"event": "device", "kind": "cpu", "kernels": "x86-64-v4", "level": "info"}',
    REPLICA + '{"event": "loading", "model": "demo", "percent": 0, "level": "info"}',
    REPLICA + '{"event": "loading", "model": "demo", "percent": 100, "level": "info"}',
    REPLICA + '{"event": "ready", "model": "demo", "level": "info"}',
]


def shown(lines, capsys, *, models=("demo",)) -> list[str]:
    report = StartReport(address="http://x", models=frozenset(models), log=Path("serve.log"))
    with report:
        for line in lines:
            report.read(line + "\n")
    return capsys.readouterr().err.splitlines()


def test_a_start_is_a_few_lines_and_ends_with_the_address(capsys):
    lines = shown(READY, capsys)
    assert lines[:-1] == [
        "starting Ray Serve, whose output is in serve.log",
        "reading the configuration",
        "device cpu, kernels x86-64-v4",
        "demo: loaded",
    ]
    assert re.fullmatch(
        r"Caravan serves demo at http://x after \d+ s: chat page /, status /status, APIs /docs. "
        r"Ctrl-C stops it.",
        lines[-1],
    )


def test_a_start_without_haproxy_ends_with_the_address_too(capsys):
    endpoints = (
        "(ProxyActor pid=3) INFO x proxy 192.0.2.2 -- Got updated endpoints: {{Deployment("
        "name='Ingress', app='caravan'): EndpointInfo(route='/', route_patterns={})}}."
    )
    served = endpoints.format("[RoutePattern(methods=['GET', 'HEAD'], path='/')]")
    lines = [*READY[:2], endpoints.format("None"), *READY[3:]]
    assert shown(lines, capsys)[-1] == "demo: loaded"
    assert shown([*lines, served], capsys)[-1].startswith("Caravan serves demo at http://x")


def test_a_verbose_start_shows_all_output_and_ends_with_the_address(capsys):
    report = StartReport(
        address="http://x", models=frozenset(["demo"]), log=Path("serve.log"), verbose=True
    )
    with report:
        for line in READY:
            report.read(line + "\n")
    lines = [re.sub(r"\x1b\[\d+m", "", line) for line in capsys.readouterr().err.splitlines()]
    assert lines[-1].startswith("Caravan serves demo at http://x")
    assert [line for line in lines if line in READY or "pid=13276" in line] == [
        re.sub(r"\x1b\[\d+m", "", line) for line in READY
    ]


def test_a_device_is_shown_once_whatever_number_of_models_it_computes(capsys):
    lines = shown([*READY[3:4] * 2, READY[3].replace("cpu", "cuda")], capsys)
    assert lines[1:] == ["device cpu, kernels x86-64-v4", "device cuda, kernels x86-64-v4"]


def test_compiling_and_pulling_are_shown(capsys):
    pulled = [{"event": "pull", "model": "demo", "percent": percent} for percent in (3, 100)]
    events = [{"event": "compiling kernels"}, *pulled]
    lines = shown([REPLICA + json.dumps(event | {"level": "info"}) for event in events], capsys)
    assert lines[1:] == ["compiling the CPU kernels, once: up to a minute", "demo: pulled"]


CONTROLLER = "\x1b[36m(ServeController pid=1)\x1b[0m "
BROKEN_IMPORT = [
    CONTROLLER
    + "ERROR 2026-11-26 12:51:10,754 controller 1 -- Deploying app 'caravan' failed with "
    "exception:",
    CONTROLLER + "Traceback (most recent call last):",
    "(ProxyActor pid=2) INFO 2026-11-26 12:51:10,754 proxy -- Got updated endpoints: {}.",
    CONTROLLER + "ModuleNotFoundError: No module named 'other'",
    CONTROLLER,
    CONTROLLER + "INFO 2026-11-26 12:51:11,754 controller 1 -- Creating node manager",
    CONTROLLER + "further text",
]


def test_an_application_that_cannot_be_built_ends_the_start_with_its_error(capsys):
    report = StartReport(address="http://x", models=frozenset({"demo"}), log=Path("serve.log"))
    with report:
        for line in BROKEN_IMPORT:
            report.read(line + "\n")
            assert report.failed
    report.ended(0)
    said = capsys.readouterr().err.splitlines()
    assert said[-2:] == [
        "The server could not start. All of its output: serve.log",
        "application caravan: ModuleNotFoundError: No module named 'other'",
    ]


def test_an_application_that_cannot_be_replaced_does_not_end_the_server(capsys):
    report = StartReport(address="http://x", models=frozenset({"demo"}), log=Path("serve.log"))
    with report:
        for line in [*READY, *BROKEN_IMPORT]:
            report.read(line + "\n")
    assert not report.failed
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == "application caravan was not replaced: see the log"


@pytest.mark.parametrize("missing", [2, len(READY) - 1], ids=["the server", "the model"])
def test_it_is_not_ready_before_server_and_models_are(missing, capsys):
    lines = shown(READY[:missing] + READY[missing + 1 :], capsys)
    assert not any(line.startswith("Caravan serves") for line in lines)


def test_a_model_that_cannot_be_served_is_reported_and_not_waited_for(capsys):
    refused = {
        "event": "not served",
        "model": "demo",
        "reason": "large\x1b[2J",
        "level": "error",
    }
    lines = shown([*READY[:3], REPLICA + json.dumps(refused)], capsys)
    assert "demo: large\\x1b[2J" in lines
    assert lines[-1].startswith("Caravan serves none of the models yet")


def test_a_model_that_no_node_can_host_does_not_delay_the_others(capsys):
    refused = {
        "event": "not schedulable",
        "model": "big",
        "deployment": "big",
        "reason": "model 'big' waits for resources",
        "level": "error",
    }
    hosted = REPLICA + json.dumps({"event": "ready", "model": "big", "level": "info"})
    waiting = REPLICA + json.dumps(refused)
    lines = shown([*READY, waiting], capsys, models=("demo", "big"))
    assert lines[-2] == "model 'big' waits for resources"
    assert lines[-1].startswith("Caravan serves demo at")
    lines = shown([waiting, hosted, *READY], capsys, models=("demo", "big"))
    assert lines[-1].startswith("Caravan serves big, demo at"), "another node was added"


@pytest.mark.parametrize(("own", "cpus"), [({}, 0), ({"RAY_ADDRESS": "10.0.0.1:6379"}, None)])
def test_models_may_outnumber_the_processors_in_a_ray_of_its_own(own, cpus, tmp_path):
    config = config_of([DEMO, DEMO], NOTHING, Store(tmp_path), own)
    models = config["applications"][0]["args"]["models"]
    assert [model.get("num_cpus") for model in models] == [cpus, cpus]


def test_later_warnings_are_shown_and_requests_are_not(capsys):
    warning = {"event": "host name refused", "host": "evil", "level": "warning", "timestamp": "t"}
    request = "(ServeReplica:caravan:Ingress pid=2) INFO x -- POST /api/chat 200 24.3ms"
    lines = shown([*READY, request, REPLICA + json.dumps(warning)], capsys)
    assert lines[-1] == "host name refused: host: evil"


def test_models_become_a_valid_configuration(tmp_path):
    store = Store(tmp_path)
    names = ["llama3.2:1b", "ollama://qwen3:4b", "hf://org/repo:Q4_K_M", "mine"]
    for name in names:
        put(store, str(named_source(name, store).name), {"model": b"1"})
    config = config_of([DEMO, *names], NOTHING | {"port": 8080, "context": 512}, store, {})
    settings = read_settings(config["applications"][0]["args"])
    assert [(model.name, model.source) for model in settings.models] == [
        ("demo", DEMO),
        ("llama3.2:1b", "ollama://llama3.2:1b"),
        ("qwen3:4b", "ollama://qwen3:4b"),
        ("repo:Q4_K_M", "hf://org/repo:Q4_K_M"),
        ("mine", "ollama://mine:latest"),
    ]
    assert {model.context_tokens for model in settings.models} == {512}
    assert config["http_options"] == {"host": "127.0.0.1", "port": 8080}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("models/My Model (Q8).gguf", "My-Model-Q8"),
        ("./blobs/sha256-0123", "sha256-0123"),
        ("/models/.gguf", "gguf"),
        ("hf://org/repo/small model.gguf", "small-model"),
    ],
)
def test_any_file_has_a_name_that_requests_may_use(source, name):
    assert served_name(source) == name
    read_settings({"models": [{"name": name, "source": DEMO}]})


def test_a_folder_is_reported_as_one():
    assert (
        "models: is a directory" in run("serve", "models/", "--port", free_port(), status=1).stderr
    )


def test_without_models_those_of_the_store_are_served_on_demand(tmp_path, capsys):
    config = config_of([], NOTHING | {"context": 512}, Store(tmp_path), {})
    settings = read_settings(config["applications"][0]["args"])
    assert settings.models == ()
    assert settings.on_demand is not None
    assert settings.on_demand.model.context_tokens == 512
    assert shown(READY[:3], capsys, models=())[-1].startswith("Caravan serves models on demand at")


def test_a_model_of_the_store_is_served_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("CARAVAN_MODELS", str(tmp_path))
    put(Store(tmp_path), "mine", {"model": Path(DEMO).read_bytes()})
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config_of(["mine"], NOTHING, Store(tmp_path), {})))
    assert check(path) == [], "the model was found, and can be served"


def test_the_configuration_has_what_the_quickstart_has(tmp_path):
    config = config_of([DEMO], NOTHING, Store(tmp_path), {})
    quickstart = yaml.safe_load(Path("configs/quickstart.yaml").read_text())
    for key in ("proxy_location", "http_options", "controller_options"):
        assert config[key] == quickstart[key]
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    assert check(path) == []


def test_a_misspelt_path_is_not_taken_for_a_name_without_saying_so(monkeypatch, tmp_path):
    def pull_one(*_, **__):
        raise SourceError("registry.ollama.ai has no such model.")

    monkeypatch.setattr("serve_app.cli.serve.pull_one", pull_one)
    with pytest.raises(SourceError, match=r"no such model\. Nor is there a file modls/demo\."):
        config_of(["modls/demo"], NOTHING, Store(tmp_path), {})


def test_the_log_is_below_the_users_folder_of_states():
    assert log_path({"XDG_STATE_HOME": "/s"}, 8000) == Path("/s/caravan/serve-8000.log")


def test_mistakes_are_reported_before_ray_starts(tmp_path):
    assert "excludes other models" in run("serve", "a.yaml", "b.gguf", status=2).stderr
    assert "excludes" in run("serve", "a.yaml", "--port", 80, status=2).stderr
    missing = run("serve", tmp_path / "x.gguf", "--port", free_port(), status=1).stderr
    assert missing.count("\n") == 1 and "x.gguf" in missing
    assert "x.yaml" in run("serve", tmp_path / "x.yaml", status=1).stderr


def test_a_port_in_use_is_reported_before_a_model_is_pulled(tmp_path, monkeypatch):
    monkeypatch.setattr("serve_app.cli.serve.pull_one", lambda *_, **__: pytest.fail("pulled"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = run("serve", "large:70b", "--port", port, status=1, store=Store(tmp_path))
    assert f"port {port} of 127.0.0.1 is not available" in refused.stderr


def test_a_port_of_another_machine_is_not_checked_on_this_one(tmp_path, monkeypatch):
    """Serve already has that of a cluster here, which gets another configuration."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr("serve_app.cli.serve._serve", lambda path, verbose: 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        run("serve", "--port", taken.getsockname()[1], store=Store(tmp_path))


QUICKSTART = Path("configs/quickstart.yaml")


def test_rays_own_processes_have_the_variables_of_the_configuration():
    stated = yaml.safe_load(QUICKSTART.read_text())
    with run_arguments(QUICKSTART, {}) as ([*options, path], variables):
        assert options == ["--address", "local"]
        written = yaml.safe_load(path.read_text())
    assert variables == SERVE_ENVIRONMENT == stated["controller_options"]["runtime_env"]["env_vars"]
    del stated["controller_options"]
    assert written == stated and not path.exists()


def test_a_ray_that_runs_gets_the_configuration_as_it_is():
    with run_arguments(QUICKSTART, {"RAY_ADDRESS": "10.0.0.1:6379"}) as (arguments, variables):
        assert (arguments, variables) == ([QUICKSTART], {})


@pytest.mark.parametrize(
    "options",
    [
        None,
        {"runtime_env": {"env_vars": {"PATH": "/x:${PATH}"}}},
        {"runtime_env": {"env_vars": {"A": 1}}},
        {"runtime_env": {"env_vars": {"A": "1"}, "pip": ["x"]}},
        {"runtime_env": {"env_vars": {"A": "1"}}, "other": 1},
        "text",
    ],
)
def test_other_options_of_the_controller_are_left_to_serve(tmp_path, options):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"applications": [], "controller_options": options}))
    with run_arguments(path, {}) as (arguments, variables):
        assert (arguments, variables) == (["--address", "local", path], {})


def started(
    folder: Path, program: str, port: int, *options: str, hangup: signal.Handlers = signal.SIG_DFL
) -> subprocess.Popen[str]:
    """`caravan serve` with this program in place of Serve, which first prints "started". Without
    models, nothing imports torch. `hangup`: what it does at first at SIGHUP."""
    (folder / "temporary").mkdir()
    python = folder / "python"
    python.write_text(
        f"#!{sys.executable}\nimport signal\nsignal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        f"print('started', flush=True)\n{program}\n"
    )
    python.chmod(0o755)
    caller = (
        "import signal, sys; sys.executable = sys.argv.pop(1)\n"
        f"signal.signal(signal.SIGHUP, signal.Handlers({hangup:d}))\n"
        "from serve_app.cli.main import main\nmain()"
    )
    folders = {
        "XDG_STATE_HOME": str(folder),
        "CARAVAN_MODELS": str(folder),
        "TMPDIR": str(folder / "temporary"),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", caller, python, "serve", "--port", str(port), *options],
        stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, **folders},
    )  # fmt: skip
    assert process.stderr is not None
    assert "is empty" in process.stderr.readline()
    assert process.stderr.readline().startswith("starting Ray Serve")
    return process


def await_started(folder: Path, port: int) -> None:
    log = folder / "caravan" / f"serve-{port}.log"
    while "started" not in log.read_text():
        time.sleep(0.01)


def test_serve_imports_this_code_whatever_the_working_directory_has(tmp_path):
    port = free_port()
    process = started(tmp_path, "import sys; print(sys.argv[1:7])", port)
    process.stderr.read()
    process.wait()
    log = (tmp_path / "caravan" / f"serve-{port}.log").read_text()
    module = ["-P", "-m", "serve_app.cli.ray_serve"]
    assert str([*module, "run", "--app-dir", str(ROOT)]) in log


@pytest.mark.parametrize(
    ("interruption", "options"),
    [(None, []), (None, ["--verbose"]), (signal.SIGINT, ["--verbose"]), (signal.SIGHUP, [])],
)
def test_an_end_of_the_server_is_reported(tmp_path, interruption, options):
    port = free_port()
    program = "raise ValueError('broken')" if interruption is None else "signal.pause()"
    process = started(tmp_path, program, port, *options)
    if interruption is not None:
        await_started(tmp_path, port)
        process.send_signal(interruption)
    told = process.stderr.read()
    status = process.wait()
    assert not [*(tmp_path / "temporary").iterdir()]
    if interruption is not None:
        assert set(told.splitlines()) == {"stopping", *(["started"] if options else [])}
    else:
        assert "ValueError: broken" in told
        assert "The server ended with status 1." in told
        assert told.splitlines()[-1].endswith("ValueError: broken")
        assert status == 1


@pytest.mark.parametrize(
    ("host", "shown"), [("::1", "[::1]"), ("127.0.0.2", "127.0.0.2"), ("0.0.0.0", "localhost")]
)
def test_the_address_is_announced_as_clients_write_it(tmp_path, host, shown):
    port = free_port()
    process = started(tmp_path, f"print({READY[2]!r})", port, "--listen", host)
    assert f"Caravan serves models on demand at http://{shown}:{port} " in process.stderr.read()
    process.wait()


def test_a_server_that_nohup_started_ignores_a_closed_terminal(tmp_path):
    port = free_port()
    process = started(tmp_path, "signal.pause()", port, hangup=signal.SIG_IGN)
    await_started(tmp_path, port)
    (ignored,) = re.findall(r"SigIgn:\s+(\w+)", Path(f"/proc/{process.pid}/status").read_text())
    assert int(ignored, 16) & 1 << signal.SIGHUP - 1
    process.send_signal(signal.SIGINT)
    assert process.stderr.read() == "stopping\n" and process.wait() == 0


def test_a_server_whose_log_cannot_be_written_continues(tmp_path):
    port = free_port()
    log = log_path({"XDG_STATE_HOME": str(tmp_path)}, port)
    log.parent.mkdir()
    log.symlink_to("/dev/full")
    process = started(tmp_path, "for _ in range(20_000): print('a line')\nexit(7)", port)
    told = process.stderr.read()
    assert told.count("cannot be written: No space left on device") == 1
    assert "The server ended with status 7." in told
    assert process.wait() == 7


def test_without_a_log_its_file_is_not_named(capsys):
    report = StartReport(address="http://x", models=frozenset(), log=None)
    with report:
        report.ended(1)
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first == "starting Ray Serve" and last.endswith("`--verbose` shows it")


def test_standard_error_that_cannot_be_written_does_not_end_the_server(monkeypatch):
    report = StartReport(address="http://x", models=frozenset(), log=Path("x"), verbose=True)
    with suppress(OSError), open("/dev/full", "w") as full:  # closing it fails
        monkeypatch.setattr(sys, "stderr", full)
        with report:
            for line in BROKEN_IMPORT:
                report.read(line + "\n")
    assert report.failed, "all lines were read"

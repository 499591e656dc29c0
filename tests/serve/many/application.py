"""An application with models of the store, loaded on demand, next to configured ones.

Of these one is pulled from a registry when it starts ("pulled"), one fits on no node ("huge"), and
one does not fit in its memory ("giant").
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray import serve

from model_zoo.store.store import Store
from serve_app.app import build
from serve_app.config.settings import AppSettings, read_settings
from serve_app.on_demand.loader import StoreLoader
from tests.checkout import DEMO_MODEL
from tests.loopback import Server, serving
from tests.patience import HANG_S
from tests.published import Registry
from tests.serve.application import Application, await_http
from tests.unit.serve_app.cli.cli_runs import put

NAME, PATH = "many", "/many"
DEMO_BYTES = DEMO_MODEL.read_bytes()
# Bytes that no other model has brought into the store, which is one for all.
PULLED_BYTES = DEMO_BYTES + bytes(32)
ENGINE = {"context_tokens": 128, "max_sequences": 2, "device": "cpu", "threads": 1}
SMALL = {**ENGINE, "num_cpus": 0.1}


@contextmanager
def registry_server() -> Iterator[Server]:
    published = Registry()
    layers = [("model", DEMO_BYTES), ("params", b'{"num_predict": 3}'), ("system", b"Be brief.")]
    published.publish("library/parrot:latest", layers)
    layers = [
        ("model", PULLED_BYTES),
        ("template", b"{{ .Prompt }}"),
        ("params", b'{"temperature": 0, "num_predict": 3}'),
        ("system", b"Be brief."),
    ]
    published.publish("library/demo:latest", layers)
    with serving(published) as server:
        yield server


@contextmanager
def running(application: Application, registry: Server, tiny: Path) -> Iterator[str]:
    """Yields the URL; the store has the models "demo" and "tiny"."""
    store = Store(Path(os.environ["CARAVAN_MODELS"]))
    put(store, "demo", {"model": DEMO_BYTES, "license": b"MIT"})
    put(store, "tiny", {"model": tiny.read_bytes()})
    args = arguments(registry)
    args["on_demand"]["max_loaded_bytes"] = room_for_one(args)
    target = serve.RunTarget(build(args), name=NAME, route_prefix=PATH)
    serve.run_many([target], wait_for_applications_running=False)
    try:
        await_http(f"{application.url}{PATH}")
        yield f"{application.url}{PATH}"
    finally:
        # Not waited for: Serve takes half a minute to give up on a replica that no node can host.
        serve.delete(NAME, _blocking=False)


def arguments(registry: Server) -> dict[str, Any]:
    source = {"source": str(DEMO_MODEL)}
    pulled = {"source": f"ollama://{registry.host}/library/demo", **SMALL, "context_tokens": None}
    models = [
        {"name": "fixed", **source, **SMALL},
        {"name": "huge", **source, **ENGINE, "num_gpus": 4},
        {"name": "giant", **source, **SMALL, "memory_bytes": 1_000_000},
        {"name": "pulled", **pulled},
    ]
    section = {"model": ENGINE, "pull_hosts": [registry.host], "num_cpus": 1}
    return {
        "models": models,
        "on_demand": section,
        "manage_models": True,
        "responses": None,
        "start_timeout_s": HANG_S,
    }


def room_for_one(args: dict[str, Any]) -> int:
    """Bytes in which one of the two models of the store fits, but not both."""
    settings: AppSettings = read_settings(args)
    assert settings.on_demand is not None
    loader = StoreLoader(settings.on_demand)
    least = [loader.outline(loader.find(name))[1].minimum_bytes for name in ("demo", "tiny")]
    assert min(least) > 1000
    return sum(least) - 1000

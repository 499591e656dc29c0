"""`python -m bench.call_path`: our functions between HTTP and the first kernel of a text chat.

The model runs in this process behind a real direct stream; only Ray is replaced. The second request
is measured, so that loading, connecting and first compilations do not count. Two numbers:

- the call path: functions on the stack at each stage of a request (`HOPS`) and at the first kernel;
- all functions that were entered meanwhile, including the helpers of those.

Each function counts once. Comprehensions, lambdas, generated methods (such as `__init__` of a
dataclass) and properties do not count.
"""

import argparse
import asyncio
import inspect
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import httpx

from bench.plain import OneReplica
from serve_app.api.bodies import BodyLimits
from serve_app.api.ingress import IngressOptions, ingress_app
from serve_app.api.request_images import ImageRules
from serve_app.config.settings import ModelSettings
from serve_app.gateway.backend import ChatBackend
from serve_app.gateway.model_registry import ModelRegistry, configured_model
from serve_app.messages.tasks import Task
from serve_app.replica.file_headers import listed_model
from serve_app.replica.loading import load_replica
from serve_app.replica.replica import ModelReplica
from serve_app.routing.load_reports import LoadReporter
from serve_app.routing.policy import RoutingPolicy
from serve_app.routing.prefix_hashes import prefix_hashes_of
from serve_app.transport.generation import generation_server
from serve_app.transport.wire import Address
from tests.checkout import DEMO_MODEL, ROOT

PACKAGES = ("serve_app", "model_zoo", "runtime")
# The stages of a request: its handler, the choice of a replica, sending and receiving it, the
# template, tokenization, and the engine.
HOPS = (
    "serve_app.api.ollama:OllamaChat.chat",
    "serve_app.api.reply:Reply.__call__",
    "serve_app.routing.policy:RoutingPolicy.choose",
    "serve_app.transport.connection:FramedConnection.send_long",
    "serve_app.routing.load_reports:LoadReporter.generate",
    "model_zoo.chat.sandbox.renderer:Renderer.render",
    "model_zoo.tokenizers.tokenizer:Tokenizer.encode_parts",
    "runtime.engine.async_engine:AsyncEngine._submit",
    "runtime.engine.scheduler:Scheduler.add",
    "runtime.engine.scheduler:Scheduler.plan",
    "runtime.worker.input_preparer:InputPreparer.prepare",
)
KERNELS, MODELS = str(ROOT / "runtime" / "kernels"), str(ROOT / "model_zoo")


class LocalReplicas(OneReplica):
    """Chooses the only replica as `ReplicaSet` does, without Ray's list of replicas."""

    def __init__(self, replica: ModelReplica, address: Address) -> None:
        super().__init__(replica)
        self._address = address
        self._policy = RoutingPolicy()
        self._policy.add(address.replica)

    async def choose(
        self, task: Task, *, avoid: frozenset[str] = frozenset(), identity: str | None = None
    ) -> Address:
        now = asyncio.get_running_loop().time()
        self._policy.choose(prefix_hashes_of(task), now=now, avoid=avoid, request=task.id)
        return self._address


class Recorder:
    """Records functions of our packages while `active`, until a model calls its first kernel."""

    def __init__(self) -> None:
        self.path: dict[CodeType, None] = {}
        self.entered: dict[CodeType, None] = {}
        self.active = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if not self.active or event != "call":
            return
        code = frame.f_code
        if code.co_filename.startswith(KERNELS):
            caller = frame.f_back
            if caller is not None and caller.f_code.co_filename.startswith(MODELS):
                self._record_stack(caller)
                self.active = False
        elif _counted(frame):
            self.entered.setdefault(code)
            if _name(code) in HOPS:
                self._record_stack(frame)

    def _record_stack(self, frame: FrameType | None) -> None:
        stack = []
        while frame is not None:
            if _counted(frame):
                stack.append(frame.f_code)
            frame = frame.f_back
        self.path |= dict.fromkeys(reversed(stack))


def _counted(frame: FrameType) -> bool:
    code = frame.f_code
    folder = code.co_filename.removeprefix(f"{ROOT}/").split("/")[0]
    if folder not in PACKAGES or code.co_name.startswith("<"):
        return False
    return not _is_property(frame)


def _is_property(frame: FrameType) -> bool:
    owner = frame.f_locals.get("self")
    member = inspect.getattr_static(type(owner), frame.f_code.co_name, None)
    return isinstance(member, property)


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Installs the recorder in this thread and in all threads that start meanwhile."""
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    try:
        yield
    finally:
        threading.setprofile(None)
        sys.setprofile(None)


async def text_path(settings: ModelSettings) -> tuple[list[str], list[str]]:
    """The call path and all entered functions, in the order of their calls, as module:name."""
    recorder = Recorder()
    with recording(recorder):
        replica = load_replica(settings)
        reporter = LoadReporter(replica.generate, replica.statistics)
        server = generation_server(reporter.generate, report=reporter.report)
        address = await server.start("127.0.0.1")
        served = configured_model(settings, listed_model(settings, os.environ))
        registry = ModelRegistry([served], {settings.name: LocalReplicas(replica, address)})
        backend = ChatBackend(registry, start_timeout_s=60.0)
        options = IngressOptions(
            api_keys=None, body_limits=BodyLimits(1 << 20), image_rules=ImageRules()
        )
        app = ingress_app(backend, options)
        transport = httpx.ASGITransport(app)
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
                await _chat(client, settings.name, "Hello")
                await asyncio.sleep(1.0)  # until the engine is idle
                recorder.active = True
                await _chat(client, settings.name, "How are you?")
        finally:
            backend.close()
            await server.close(drain_s=1.0)
            replica.close()
    return [_name(code) for code in recorder.path], [_name(code) for code in recorder.entered]


async def _chat(client: httpx.AsyncClient, model: str, question: str) -> None:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "stream": True,
        "options": {"num_predict": 2},
    }
    reply = await client.post("/api/chat", json=body, timeout=600.0)
    reply.raise_for_status()


def _name(code: CodeType) -> str:
    module = code.co_filename.removeprefix(f"{ROOT}/").removesuffix(".py").replace("/", ".")
    return f"{module}:{code.co_qualname}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.call_path", description=__doc__)
    parser.add_argument(
        "model",
        type=Path,
        nargs="?",
        default=DEMO_MODEL,
        help="a GGUF file; default: the demo model",
    )
    arguments = parser.parse_args()
    settings = ModelSettings(name="demo", source=str(arguments.model), threads=1, device="cpu")
    path, entered = asyncio.run(text_path(settings))
    for title, functions in (("Call path", path), ("All functions entered", entered)):
        print(f"{title}: {len(functions)}")
        print("\n".join(f"{number:5} {name}" for number, name in enumerate(functions, 1)))


if __name__ == "__main__":
    main()

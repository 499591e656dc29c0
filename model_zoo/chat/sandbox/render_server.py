"""The server process that forks a process for each template, which compiles and renders it.

It has no threads and few imports, so that forking is safe and takes about a millisecond.
"""

import gc
import json
import marshal
import os
import signal
import socket
from collections.abc import Callable
from datetime import datetime

from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.sandbox import SecurityError

from model_zoo.chat.sandbox.environment import (
    SandboxEnvironment,
    given_variables,
    inspected_texts,
    names_in,
    strftime_at,
)
from model_zoo.chat.sandbox.frames import PID, Outcome, RenderLimits, receive_request, send_reply
from model_zoo.chat.sandbox.kernel_limits import accept_limits, address_space_bytes, limited

_MOST_EXPLAINED = 500
Body = bytes | bytearray


def main(control: socket.socket) -> None:
    """Serves each connection received over `control` in a fork, until `control` is closed."""
    accept_limits()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    environment = SandboxEnvironment()
    gc.freeze()
    while descriptors := socket.recv_fds(control, 1, 1)[1]:
        pid = os.fork()
        if pid == 0:
            try:
                control.close()
                _serve(socket.socket(fileno=descriptors[0]), environment)
            finally:
                os._exit(0)
        os.close(descriptors[0])
        control.sendall(PID.pack(pid))


def _serve(connection: socket.socket, environment: SandboxEnvironment) -> None:
    """Serve one template. The first request is its source; all others are variables to render."""
    idle_bytes = address_space_bytes()
    template: Template | None = None

    def compiled(body: Body) -> str:
        nonlocal template
        source = body.decode("utf-8", "surrogatepass")
        tree = environment.parse(source)
        template = environment.from_string(tree)
        found = {
            "inspected": inspected_texts(tree),
            "names": names_in(tree),
            "variables": given_variables(tree),
        }
        return json.dumps(found, default=sorted)

    def rendered(body: Body) -> str:
        assert template is not None
        variables, now = marshal.loads(body)
        if now is not None:
            variables["strftime_now"] = strftime_at(datetime.fromisoformat(now))
        return template.render(variables)

    while (request := receive_request(connection)) is not None:
        limits, body = request
        if template is None:
            reply = _done(compiled, body, limits, idle_bytes)
            idle_bytes = address_space_bytes()
        else:
            reply = _done(rendered, body, limits, idle_bytes)
        send_reply(connection, *reply)


def _done(
    work: Callable[[Body], str], body: Body, limits: RenderLimits, idle_bytes: int
) -> tuple[Outcome, bytes]:
    with limited(limits, idle_bytes=idle_bytes):
        try:
            text = work(body).encode("utf-8", "surrogatepass")
        except MemoryError:
            return Outcome.TOO_MUCH_MEMORY, b""
        except Exception as error:  # a template is a program and may raise anything
            outcome, explanation = _explained(error)
            return outcome, explanation[:_MOST_EXPLAINED].encode("utf-8", "replace")
    if len(text) > limits.reply_bytes:
        return Outcome.TOO_MUCH_TEXT, b""
    return Outcome.DONE, text


def _explained(error: Exception) -> tuple[Outcome, str]:
    if isinstance(error, SecurityError):
        return Outcome.FORBIDDEN, str(error)
    if isinstance(error, TemplateSyntaxError):
        return Outcome.REFUSED, f"line {error.lineno}: {error.message}"
    if isinstance(error, TemplateError):
        return Outcome.REFUSED, str(error)
    return Outcome.FAILED, f"{type(error).__name__}: {error}"

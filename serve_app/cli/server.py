"""Requests of commands to a running server, in Ollama's protocol."""

import json
import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click
import httpx

from model_zoo.sources.proxies import proxy_of, trusted_certificates
from runtime.errors import CaravanError

DEFAULT_HOST = "http://localhost:8000"
CONNECT_S = 10.0
_LONGEST_ERROR = 2_000


class ServerError(CaravanError):
    """The server cannot be reached, or it answered with an error."""


class NoAnswer(ServerError):
    """No server listens there."""


class NotFound(ServerError):
    """The server does not have the model."""


class Server:
    """A server at `host`, with `key` if it has API keys. Answers have no time limit.

    ConfigurationError for a proxy or certificates of the environment that cannot be used.
    """

    def __init__(self, host: str, key: str | None) -> None:
        self.host = with_scheme(host)
        self.headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._client = httpx.Client(
            base_url=self.host,
            headers=self.headers,
            verify=trusted_certificates(),
            proxy=proxy_of(httpx.URL(self.host), os.environ),
            trust_env=False,
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            follow_redirects=False,
        )

    def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        """The JSON document of a path. Raises ServerError."""
        timeout = self._client.timeout if timeout_s is None else httpx.Timeout(timeout_s)
        with self._errors():
            return _checked(self._client.get(path, timeout=timeout)).json()

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON document that answers `body`. Raises ServerError."""
        with self._errors():
            return _checked(self._client.post(path, json=body)).json()

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The JSON lines that answer `body`, as they arrive. Raises ServerError. Closing the
        iterator ends the request."""
        with self._errors(), self._client.stream("POST", path, json=body) as response:
            if response.is_error:
                response.read()
            _checked(response)
            for line in response.iter_lines():
                if not line.strip():
                    continue
                part = json.loads(line)
                if "error" in part:
                    raise ServerError(str(part["error"])[:_LONGEST_ERROR])
                yield part

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError:
            raise NoAnswer(
                f"no server answers at {self.host}; start one with `caravan serve`, or name "
                "another in CARAVAN_HOST"
            ) from None
        except (httpx.HTTPError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise ServerError(f"{self.host}: {reason[:_LONGEST_ERROR]}") from None


def with_scheme(host: str) -> str:
    """`host`, `host:port` or a URL -> a URL; with the default port where none is given."""
    if "://" in host:
        return host.rstrip("/")
    bare = host.rstrip("/")
    has_port = bare.rpartition(":")[2].isdigit() and not bare.endswith("]")
    return f"http://{bare}" if has_port else f"http://{bare}:8000"


def server_options(command: Any) -> Any:
    """`server`: the Server that the command uses."""

    def made(context: click.Context, parameter: click.Parameter, host: str) -> Server:
        try:
            return Server(host, os.environ.get("CARAVAN_API_KEY") or None)
        except httpx.InvalidURL as error:
            raise click.BadParameter(f"{host!r} is no URL: {error}.") from None

    return click.option(
        "--host",
        "server",
        envvar="CARAVAN_HOST",
        default=DEFAULT_HOST,
        metavar="URL",
        callback=made,
        help=f"Server; default: $CARAVAN_HOST, or else {DEFAULT_HOST}. "
        "Its API key: $CARAVAN_API_KEY.",
    )(command)


def _checked(response: httpx.Response) -> httpx.Response:
    if not response.is_success:
        kind = NotFound if response.status_code == 404 else ServerError
        raise kind(_reason(response))
    return response


def _reason(response: httpx.Response) -> str:
    try:
        document = response.json()
    except ValueError:
        document = None
    error = document.get("error") if isinstance(document, dict) else None
    text = error if isinstance(error, str) else response.text.strip()
    reason = text[:_LONGEST_ERROR] or f"the server answered with status {response.status_code}"
    if response.status_code == 401:
        return f"{reason} (set CARAVAN_API_KEY)"
    return reason

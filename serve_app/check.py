"""Checks of a configuration before Serve starts.

`serve run` checks the same, but only logs an error and keeps waiting.
"""

import errno
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from pydantic import BaseModel, Field, ValidationError

from runtime.errors import ConfigurationError
from serve_app.api.keys import read_keys
from serve_app.config.settings import AppSettings, read_settings
from serve_app.config.wrong_values import REQUIRED_TYPES
from serve_app.replica.model_check import CHECKED_VARIABLE, check_model, model_digest

IMPORT_PATH = "serve_app.app:build"
_OPEN = (
    "`http_options` states no `host`, so the server listens on all addresses of this machine; "
    "`host: 127.0.0.1` accepts connections from this machine only."
)
_FIXES = MappingProxyType(
    {
        errno.EADDRINUSE: "Stop the process that listens there, or choose another port: "
        "`port` of `http_options` in a configuration, `--port` without one.",
        errno.EACCES: "Choose a port that this user may open, such as 8000.",
    }
)
# The keys of Serve's own schema, which ignores others: of a file, of `http_options` and of each of
# `applications`.
FILE_KEYS = (
    "proxy_location http_options grpc_options controller_options logging_config tracing_config "
    "applications target_capacity"
).split()
SECTION_KEYS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "http_options": (
            "host port root_path request_timeout_s keep_alive_timeout_s ssl_keyfile ssl_certfile "
            "ssl_keyfile_password ssl_ca_certs"
        ).split(),
        "applications": (
            "name route_prefix import_path runtime_env host port deployments autoscaling_policy "
            "args logging_config external_scaler_enabled"
        ).split(),
    }
)


class HttpOptions(BaseModel):
    """Where Serve listens, with the defaults of its schema."""

    host: str = "0.0.0.0"
    port: int = Field(default=8000, ge=0, le=65535)


def check(path: Path) -> list[str]:
    """Checks settings, API keys and model files; returns messages about models that must be pulled
    and about access from other machines that is not stated.

    Raises a CaravanError for the first bad setting, API key file or model file, and for a working
    directory that Ray cannot use.
    """
    _check_working_directory()
    config = read_config(path)
    _check_keys(path, config)
    http = http_options(config)
    arguments = list(application_arguments(config))
    if not arguments:
        raise ConfigurationError(f"{path}: no application has `import_path: {IMPORT_PATH}`.")
    settings = [read_settings(args) for args in arguments]
    for each in settings:
        read_keys(each.api_keys_file, os.environ)
    notes = [note for each in settings for note in map(check_model, each.models) if note]
    return notes if "host" in http.model_fields_set else [*notes, _OPEN]


def _check_working_directory() -> None:
    """Ray sends its name to other processes as UTF-8."""
    folder = os.getcwd()
    try:
        folder.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(
            f"The working directory {folder!r} is not UTF-8, so Ray cannot start there. Choose "
            "another."
        ) from None


def checked_environment(path: Path) -> dict[str, str]:
    """Variables for processes that need not repeat the checks of this configuration's models."""
    settings = map(read_settings, application_arguments(read_config(path)))
    digests = [model_digest(model) for each in settings for model in each.models]
    return {CHECKED_VARIABLE: " ".join(filter(None, digests))}


def check_port(http: HttpOptions) -> None:
    """Raises ConfigurationError if the HTTP port is in use or may not be bound."""
    family = socket.AF_INET6 if ":" in http.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((http.host, http.port))
        except OSError as error:
            fix = _FIXES.get(error.errno or 0, "Choose an address of this machine as `host`.")
            raise ConfigurationError(
                f"`http_options`: port {http.port} of {http.host} is not available: "
                f"{error.strerror}. {fix}"
            ) from error


def http_options(config: Mapping[str, Any]) -> HttpOptions:
    """Raises ConfigurationError if they are wrong."""
    try:
        return HttpOptions.model_validate(config.get("http_options") or {})
    except ValidationError as error:
        [details, *_] = error.errors()
        place = ".".join(map(str, ("http_options", *details["loc"])))
        wanted = REQUIRED_TYPES.get(details["type"], "at least 0 and at most 65535")
        raise ConfigurationError(f"`{place}` must be {wanted}.") from None


def read_config(path: Path) -> Mapping[str, Any]:
    """The configuration of Serve. Raises ConfigurationError if it cannot be read."""
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not UTF-8 text: {error}.") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path} is not YAML{_place(error)}.") from error
    if not isinstance(config, dict):
        raise ConfigurationError(f"{path} is not a configuration of Serve: it has no keys.")
    return config


def application_arguments(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """`args` of each application of this project. Raises ConfigurationError."""
    applications = config.get("applications")
    if not isinstance(applications, list):
        raise ConfigurationError("`applications` is missing or not a list.")
    for application in applications:
        if isinstance(application, dict) and application.get("import_path") == IMPORT_PATH:
            args = application.get("args") or {}
            if not isinstance(args, dict):
                raise ConfigurationError("`args` of an application must be an object.")
            yield args


def _check_keys(path: Path, config: Mapping[str, Any]) -> None:
    """Raises ConfigurationError for the first key that Serve would ignore."""
    places: list[tuple[str, Any, Sequence[str]]] = [("", config, FILE_KEYS)]
    for name, keys in SECTION_KEYS.items():
        section = config.get(name)
        if isinstance(section, list):
            places += [(f"{name}[{index}].", each, keys) for index, each in enumerate(section)]
        else:
            places.append((f"{name}.", section, keys))
    for place, section, keys in places:
        for key in section if isinstance(section, dict) else ():
            if key not in keys:
                raise ConfigurationError(f"{path}: {place}{key} {_unknown(str(key), keys)}")


def _unknown(key: str, keys: Sequence[str]) -> str:
    if key in AppSettings.model_fields:
        return "belongs below `args` of an application; see configs/quickstart.yaml."
    near = get_close_matches(key, keys, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the keys here are {', '.join(keys)}."
    return f"is not a known key; {hint}"


def _place(error: yaml.YAMLError) -> str:
    """What is wrong, and the line, in one line."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
    return f"{where}: {problem or str(error).splitlines()[0]}"

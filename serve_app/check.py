"""Checks of a configuration before Serve starts.

`serve run` checks the same, but only logs an error and keeps waiting.
"""

import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from runtime.errors import ConfigurationError
from serve_app.api.keys import read_keys
from serve_app.config.settings import read_settings
from serve_app.replica.loading import check_model

IMPORT_PATH = "serve_app.app:build"


def check(path: Path) -> list[str]:
    """Checks settings, API keys and model files; returns messages about models that must be pulled.

    Raises a CaravanError for the first bad setting, API key file or model file.
    """
    settings = [read_settings(args) for args in application_arguments(read_config(path))]
    for each in settings:
        read_keys(each.api_keys_file, os.environ)
    models = [model for each in settings for model in each.models]
    return [note for note in map(check_model, models) if note is not None]


def check_port(path: Path) -> None:
    """Raises ConfigurationError if the HTTP port is in use or may not be bound."""
    options = read_config(path).get("http_options") or {}
    host, port = options.get("host", "127.0.0.1"), options.get("port", 8000)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigurationError(
                f"`http_options`: port {port} of {host} is not available: {error.strerror}. Stop "
                "the process that listens there, or choose another port."
            ) from error


def read_config(path: Path) -> Mapping[str, Any]:
    """The configuration of Serve. Raises ConfigurationError if it cannot be read."""
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"cannot be read: {error}") from error
    return config if isinstance(config, dict) else {}


def application_arguments(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """`args` of each application of this project. Raises ConfigurationError."""
    applications = config.get("applications")
    if not isinstance(applications, list):
        raise ConfigurationError("`applications` is missing or not a list.")
    for application in applications:
        if isinstance(application, dict) and application.get("import_path") == IMPORT_PATH:
            yield application.get("args") or {}

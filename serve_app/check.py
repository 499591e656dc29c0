"""`python -m serve_app.check CONFIG`: says what is wrong with a configuration, before Serve starts.

`serve run` itself checks the same, but reports an error in its log and goes on waiting.
"""

import os
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from runtime.errors import CaravanError, ConfigurationError
from serve_app.api.keys import read_keys
from serve_app.config.settings import read_settings
from serve_app.replica.loading import check_model

IMPORT_PATH = "serve_app.app:build"


def main(arguments: list[str]) -> int:
    try:
        (path,) = arguments
    except ValueError:
        print("usage: python -m serve_app.check CONFIG", file=sys.stderr)
        return 2
    try:
        for note in check(Path(path)):
            print(f"{path}: {note}")
        check_port(Path(path))
    except CaravanError as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 1
    return 0


def check(path: Path) -> list[str]:
    """What is to be told of models that have yet to be pulled.

    Raises the error that the first wrong setting, file of API keys or model file gives.
    """
    settings = [read_settings(args) for args in _arguments(_config(path))]
    for each in settings:
        read_keys(each.api_keys_file, os.environ)
    models = [model for each in settings for model in each.models]
    return [note for note in map(check_model, models) if note is not None]


def check_port(path: Path) -> None:
    """Raises ConfigurationError when somebody listens where Serve is to listen."""
    options = _config(path).get("http_options") or {}
    host, port = options.get("host", "127.0.0.1"), options.get("port", 8000)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigurationError(
                f"`http_options` asks for port {port} of {host}, which cannot be had: "
                f"{error.strerror}. End what listens there, or choose another port."
            ) from error


def _config(path: Path) -> Mapping[str, Any]:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"cannot be read: {error}") from error
    return config if isinstance(config, dict) else {}


def _arguments(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    applications = config.get("applications")
    if not isinstance(applications, list):
        raise ConfigurationError("has no list of `applications`.")
    for application in applications:
        if isinstance(application, dict) and application.get("import_path") == IMPORT_PATH:
            yield application.get("args") or {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`python -m serve_app.check CONFIG`: says what is wrong with a configuration, before Serve starts.

`serve run` itself checks the same, but reports an error in its log and goes on waiting.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from runtime.errors import CaravanError, ConfigurationError
from serve_app.loading import check_model
from serve_app.settings import read_settings

IMPORT_PATH = "serve_app.app:build"


def main(arguments: list[str]) -> int:
    try:
        (path,) = arguments
    except ValueError:
        print("usage: python -m serve_app.check CONFIG", file=sys.stderr)
        return 2
    try:
        check(Path(path))
    except CaravanError as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 1
    return 0


def check(path: Path) -> None:
    """Raises the error that the first wrong setting or model file gives."""
    for args in _arguments(path):
        for model in read_settings(args).models:
            check_model(model)


def _arguments(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"cannot be read: {error}") from error
    applications = config.get("applications") if isinstance(config, dict) else None
    if not isinstance(applications, list):
        raise ConfigurationError("has no list of `applications`.")
    for application in applications:
        if isinstance(application, dict) and application.get("import_path") == IMPORT_PATH:
            yield application.get("args") or {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

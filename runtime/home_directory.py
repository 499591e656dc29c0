"""Paths in home directories."""

from pathlib import Path

from runtime.errors import ConfigurationError


def expanded(path: str | Path) -> Path:
    """The path with a home directory in place of a leading `~` or `~user`. ConfigurationError if
    there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        whose = Path(path).parts[0]
        raise ConfigurationError(_without_home(path) if whose == "~" else _unknown(path)) from None


def _without_home(path: str | Path) -> str:
    return (
        f"{path}: this user has no home directory. Set HOME, or else CARAVAN_MODELS, CARAVAN_CACHE "
        "and XDG_STATE_HOME."
    )


def _unknown(path: str | Path) -> str:
    return f"{path}: no user {Path(path).parts[0][1:]} with a home directory is known here."

"""Files of Ray and HAProxy that only this user can access, in folders with short paths.

Unix limits the path of a socket to 107 bytes. They are in the folder for temporary files, or in
/tmp where its path is too long.
"""

import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from runtime.errors import ConfigurationError
from runtime.home_directory import expanded
from serve_app.haproxy import UnsafeError, take_directory
from serve_app.temporary_folders import temporary_folder

# Ray adds "/ray/", the name of a session of up to 42 bytes and "/sockets/plasma_store".
LONGEST_OF_RAY = 107 - 68
# Ray adds a slash, the id of a node of 56 bytes and "/admin.sock"; the supervisor and HAProxy use
# "/admin.PID.PID.tmp".
LONGEST_OF_HAPROXY = 107 - 83
TOKEN_BYTES = 32


def ray_folder(own: Mapping[str, str]) -> Path:
    """`RAY_TMPDIR` of this environment, or a folder that lasts. ConfigurationError if it cannot be
    used.

    In Ray's default, /tmp/ray, other users can read all logs and replace the sockets.
    """
    if stated := own.get("RAY_TMPDIR"):
        length = len(os.fsencode(os.path.abspath(stated)))
        if length > LONGEST_OF_RAY:
            raise ConfigurationError(
                f"RAY_TMPDIR has {length} bytes; more than {LONGEST_OF_RAY} are too long for the "
                "paths of Ray's sockets. Choose a shorter one."
            )
        return Path(stated)
    folder = _temporary(f"caravan-{os.getuid()}", LONGEST_OF_RAY)
    try:
        take_directory(folder)
    except (OSError, UnsafeError) as error:
        raise ConfigurationError(
            f"{folder} cannot be a folder that only this user can access. Set RAY_TMPDIR to "
            f"another one, of at most {LONGEST_OF_RAY} bytes."
        ) from error
    return folder


def ray_token(own: Mapping[str, str]) -> dict[str, str]:
    """The variable with a new token for a Ray that cannot read or keep one in the home directory,
    for example because that is read-only; nothing if it can, or if this environment states one."""
    if own.get("RAY_AUTH_TOKEN") or own.get("RAY_AUTH_TOKEN_PATH"):
        return {}
    try:
        file = expanded("~/.ray/auth_token")
        if file.exists():
            with file.open():
                pass
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=file.parent):
                pass
    except (OSError, ConfigurationError):
        return {"RAY_AUTH_TOKEN": secrets.token_hex(TOKEN_BYTES)}
    return {}


@contextmanager
def haproxy_folder() -> Iterator[Path]:
    """A folder that is removed at the end."""
    prefix = "proxy-"
    longest = _temporary(f"{prefix}12345678", LONGEST_OF_HAPROXY)
    with temporary_folder(prefix, within=longest.parent) as folder:
        yield folder


def _temporary(name: str, longest: int) -> Path:
    path = Path(tempfile.gettempdir(), name)
    return path if len(os.fsencode(path)) <= longest else Path("/tmp", name)

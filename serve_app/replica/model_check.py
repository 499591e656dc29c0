"""The check of a configured model before it is served."""

import os
import re
from hashlib import sha256

from serve_app.config.settings import ModelSettings
from serve_app.replica.load_errors import named_errors
from serve_app.replica.model_files import ModelFiles, local_files, pull_notice

# The environment variable with the `model_digest` of each model that needs no further check:
# `caravan serve` has checked it before it started the process that would check it again.
CHECKED_VARIABLE = "CARAVAN_CHECKED_MODELS"
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


def check_model(settings: ModelSettings) -> str | None:
    """Raises a CaravanError for a bad file or setting.

    A model that has not been pulled cannot be checked; then a message about that is returned.
    """
    with named_errors(f"Model {settings.name}"):
        files = local_files(settings, os.environ)
        if files is None:
            return pull_notice(settings, os.environ)
        checked = os.environ.get(CHECKED_VARIABLE, "").split()
        if checked and _digest(settings, files) in checked:
            return None
        # Imported late: the check of a file builds the model's layers, which needs torch, and its
        # import takes two seconds. Without files, as with models on demand only, it is not needed.
        from serve_app.replica.loading import check_files

        check_files(settings, files)
        return None


def model_digest(settings: ModelSettings) -> str | None:
    """Differs if settings differ, those that the model brings too, or files by their paths, sizes
    or times. None for models that are always checked: without files, or split into several."""
    files = local_files(settings, os.environ)
    if files is None or any(_PART.search(path.name) for path in files.paths):
        return None
    return _digest(settings, files)


def _digest(settings: ModelSettings, files: ModelFiles) -> str:
    parts = [settings.model_dump_json(), repr(files)]
    for path in files.paths:
        status = path.stat() if path.exists() else None
        parts.append(f"{path} {status and (status.st_size, status.st_mtime_ns)}")
    # Names of files that are not UTF-8 have surrogates in place of some bytes.
    return sha256("\n".join(parts).encode(errors="surrogatepass")).hexdigest()

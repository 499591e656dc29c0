"""The check of a configured model before it is served."""

import os

from serve_app.config.settings import ModelSettings
from serve_app.replica.load_errors import named_errors
from serve_app.replica.model_files import local_files, pull_notice


def check_model(settings: ModelSettings) -> str | None:
    """Raises a CaravanError for a bad file or setting.

    A model that has not been pulled cannot be checked; then a message about that is returned.
    """
    with named_errors(f"Model {settings.name}"):
        files = local_files(settings, os.environ)
        if files is None:
            return pull_notice(settings, os.environ)
        # Imported late: the check of a file builds the model's layers, which needs torch, and its
        # import takes two seconds. Without files, as with models on demand only, it is not needed.
        from serve_app.replica.loading import check_files

        check_files(settings, files)
        return None

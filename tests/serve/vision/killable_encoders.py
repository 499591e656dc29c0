"""A deployment for tests that stop and kill encoders. Its processes import this module, so it imports
nothing that only tests need."""

import os

from serve_app.replica.deployments import VisionEncoder


class KillableEncoder(VisionEncoder):
    """An encoder whose process a test can stop and kill."""

    async def pid(self) -> int:
        return os.getpid()

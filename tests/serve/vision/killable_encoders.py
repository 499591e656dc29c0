"""A deployment for tests that stop and kill encoders; its processes import this module, and nothing
else of the tests."""

import os

from serve_app.deployments.model_deployments import VisionEncoder


class KillableEncoder(VisionEncoder):
    """An encoder whose process a test can stop and kill."""

    async def pid(self) -> int:
        return os.getpid()

"""ASGI applications behind a real uvicorn on loopback, for tests with real clients."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

from tests.patience import until


@asynccontextmanager
async def listening(app: Any, *, http: Any = "httptools") -> AsyncIterator[int]:
    """The port; `http`: which of uvicorn's implementations. httptools is what Ray Serve has."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, http=http, lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await until(lambda: server.started)
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await serving

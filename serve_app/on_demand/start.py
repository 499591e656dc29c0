"""A process with models on demand, from its settings to when it answers."""

import asyncio
import dataclasses
import os
from contextlib import AsyncExitStack

from model_zoo.store.store import Store, default_root
from serve_app.on_demand.loader import StoreLoader
from serve_app.on_demand.model_pool import Limits, ModelPool
from serve_app.on_demand.settings import OnDemandSettings
from serve_app.on_demand.store_manager import StoreManager
from serve_app.on_demand.uploads import UploadLimits
from serve_app.transport.server import StreamServer

DRAIN_S = 20.0


async def open_store_manager(
    settings: OnDemandSettings, opened: AsyncExitStack, host: str, replica: str
) -> StoreManager:
    """`opened` ends everything: answers first, then engines. `replica`: what Serve calls it."""
    loader = await asyncio.to_thread(StoreLoader, settings)
    limits = Limits(
        max_loaded_bytes=await asyncio.to_thread(lambda: loader.max_loaded_bytes),
        max_models=settings.max_models,
        keep_alive_s=settings.keep_alive_s,
        max_waiting=settings.model.max_waiting,
    )
    pool = ModelPool(loader, limits)
    opened.push_async_callback(pool.close)
    server = StreamServer(pool.generate)
    opened.push_async_callback(server.close, drain_s=DRAIN_S)
    address = dataclasses.replace(await server.start(host), replica=replica)
    store_manager = StoreManager(
        pool,
        Store(default_root(os.environ)),
        address,
        pull_hosts=settings.pull_hosts,
        hf_token_for=settings.hf_token_for,
        uploads=UploadLimits(settings.max_upload_bytes, settings.upload_quota_bytes),
    )
    opened.callback(store_manager.close)
    sweeping = asyncio.create_task(store_manager.sweep_periodically())
    opened.callback(sweeping.cancel)
    return store_manager

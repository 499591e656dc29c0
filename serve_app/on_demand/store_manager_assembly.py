"""Assembles a process with models on demand from its settings."""

import asyncio
import dataclasses
import os
from contextlib import AsyncExitStack

from model_zoo.store.store import Store, default_root
from serve_app.config.on_demand_settings import OnDemandSettings
from serve_app.on_demand.loader import StoreLoader
from serve_app.on_demand.model_pool import ModelPool, PoolLimits
from serve_app.on_demand.store_manager import StoreManager, TransferRules
from serve_app.on_demand.uploads import UploadLimits, Uploads
from serve_app.telemetry.request_spans import spanned_replies
from serve_app.telemetry.spans import configured_spans
from serve_app.transport.generation import generation_server
from serve_app.transport.stream_server import DRAIN_S


async def open_store_manager(
    settings: OnDemandSettings, opened: AsyncExitStack, host: str, replica: str
) -> StoreManager:
    """Closing `opened` drains requests, then unloads the models. `replica`: its id in Serve."""
    loader = await asyncio.to_thread(StoreLoader, settings)
    limits = PoolLimits(
        max_loaded_bytes=loader.max_loaded_bytes,
        max_models=settings.max_models,
        keep_alive_s=settings.keep_alive_s,
        max_waiting=settings.model.max_waiting,
    )
    pool = ModelPool(loader, limits)
    opened.push_async_callback(pool.close)
    server = generation_server(spanned_replies(configured_spans(os.environ), pool.generate))
    opened.push_async_callback(server.close, drain_s=DRAIN_S)
    address = dataclasses.replace(await server.start(host), replica=replica)
    store = Store(default_root(os.environ))
    store_manager = StoreManager(
        pool,
        store,
        Uploads(store, UploadLimits(settings.max_upload_bytes, settings.upload_quota_bytes)),
        address,
        rules=TransferRules(settings.pull_hosts, settings.hf_token_for, settings.push_hosts),
    )
    opened.push_async_callback(store_manager.close)
    sweeping = asyncio.create_task(store_manager.sweep_periodically())
    opened.callback(sweeping.cancel)
    return store_manager

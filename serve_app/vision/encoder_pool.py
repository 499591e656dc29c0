"""The encoders of a pool, as a model replica's engine sees them: one ImageEncoder."""

import asyncio
import threading
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.errors import EngineDeadError, GenerationFailedError, OverloadedError
from runtime.vision.encoder import ImageLimits, PreparedImage
from serve_app.transport.client import ConnectionLost
from serve_app.transport.feature_client import PATIENCE_S, FeatureClient, LostAtWork
from serve_app.vision.encoder_choice import Directory, KnownEncoders

CLOSING_S = 10.0


@dataclass(frozen=True, slots=True)
class PoolRules:
    """`timeout_s`: what an image may take, everything included. `most_lost`: encoders that may be
    lost while they work on it; it may be what ends them. `patience_s`: an encoder that has been
    silent for so long is lost. `pause_s` and `longest_pause_s`: after all have been asked in vain.
    """

    timeout_s: float = 120.0
    most_lost: int = 3
    patience_s: float = PATIENCE_S
    pause_s: float = 0.05
    longest_pause_s: float = 1.0


class PoolEncoder:
    """See runtime.vision.encoder.ImageEncoder. Takes nothing of the device but the copy on its way.

    `tower`: the name of the file with the weights. An image goes first to the encoder that its
    digest points at, so that the same one always does; then to the others, round after round.
    """

    weight_bytes = 0
    most_submitted = None  # encoders serve tenants in turn

    def __init__(
        self,
        limits: ImageLimits,
        directory: Directory,
        *,
        tower: bytes,
        device: torch.device,
        rules: PoolRules | None = None,
    ) -> None:
        self._rules = rules or PoolRules()
        self.limits = limits
        self._encoders = KnownEncoders(directory)
        self._client = FeatureClient(
            limits, tower=tower, device=device, patience_s=self._rules.patience_s
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pool", daemon=True)
        self._thread.start()

    @property
    def workspace_bytes(self) -> int:
        return self._client.workspace_bytes

    def warm_up(self) -> None:
        """Nothing to show: encoders see at their own start to what they need."""

    def submit(self, image: PreparedImage) -> Future[Tensor]:
        """GenerationFailedError: the image cannot be encoded, or not in time."""
        features: Future[Tensor] = Future()
        asking = asyncio.run_coroutine_threadsafe(self._fulfil(image, features), self._loop)
        features.add_done_callback(lambda ended: asking.cancel() if ended.cancelled() else None)
        return features

    def close(self) -> None:
        """Images that are waited for come no more: their futures are cancelled."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(CLOSING_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSING_S)
        self._loop.close()

    async def _fulfil(self, image: PreparedImage, promised: Future[Tensor]) -> None:
        try:
            features = await self._features(image)
        except asyncio.CancelledError:
            promised.cancel()
            raise
        except Exception as error:
            if promised.set_running_or_notify_cancel():
                promised.set_exception(error)
        else:
            if promised.set_running_or_notify_cancel():
                promised.set_result(features)

    async def _features(self, image: PreparedImage) -> Tensor:
        asking = _Asking(self._rules)
        try:
            async with asyncio.timeout(self._rules.timeout_s):
                while True:
                    for address in await self._encoders.ranked(image.digest):
                        try:
                            return await self._client.features(address, image)
                        except (ConnectionLost, EngineDeadError, OverloadedError) as error:
                            self._encoders.shun(address)
                            asking.note(error)
                    self._encoders.forget()
                    await asking.pause()
        except TimeoutError:
            raise asking.out_of_time() from None

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self._client.close()


class _Asking:
    """What has been tried for one image."""

    def __init__(self, rules: PoolRules) -> None:
        self._rules = rules
        self._pause_s = rules.pause_s
        self._lost = 0
        self._last: Exception | None = None

    def note(self, error: Exception) -> None:
        """GenerationFailedError once too many encoders have ended while they worked on it."""
        self._last = error
        self._lost += isinstance(error, LostAtWork)
        if self._lost >= self._rules.most_lost:
            raise GenerationFailedError(
                f"{self._lost} vision encoders were lost while they worked on it: {error}"
            )

    async def pause(self) -> None:
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, self._rules.longest_pause_s)

    def out_of_time(self) -> GenerationFailedError:
        reason = "" if self._last is None else f" The last one asked: {self._last}"
        return GenerationFailedError(
            f"no vision encoder has given its features within {self._rules.timeout_s:g} seconds "
            f"(`vision.timeout_s`).{reason}"
        )

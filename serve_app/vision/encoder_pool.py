"""The encoders of a pool, which a model replica's engine uses as one ImageEncoder."""

import asyncio
import threading
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.errors import EngineDeadError, GenerationFailedError, OverloadedError
from runtime.vision.encoder import ImageLimits, PreparedImage
from serve_app.transport.client import SILENCE_S
from serve_app.transport.pauses import Pauses
from serve_app.transport.wire import ConnectionLost
from serve_app.vision.encoder_ranking import EncoderRanking, EncoderSource
from serve_app.vision.feature_transfer import FeatureClient

CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class PoolRules:
    """`timeout_s`: an image fails when no encoder has answered for this long; heartbeats while it
    waits for its turn are answers. `max_lost`: an image fails when this many encoders were lost
    while working on it, because it may be the cause. `silence_s`: an encoder that sends nothing for
    this long counts as lost, also one that makes no progress any more. `pause_s`, doubled up to
    `longest_pause_s`: pause after all encoders have failed.
    """

    timeout_s: float = 120.0
    max_lost: int = 3
    silence_s: float = SILENCE_S
    pause_s: float = 0.05
    longest_pause_s: float = 1.0


class PoolEncoder:
    """See runtime.vision.encoder.ImageEncoder. Uses no device memory except for arriving features.

    `tower`: digest of the file with the weights. All model replicas try the same encoder first for
    an image, so that it is encoded once; if it fails, the others in turn, repeatedly.
    """

    weight_bytes = 0
    max_submitted = None  # no limit, because encoders serve tenants in turn
    progressed_at = None  # images of other replicas may be in front
    gate = None  # encoders compute in other processes

    def __init__(
        self,
        limits: ImageLimits,
        source: EncoderSource,
        *,
        tower: bytes,
        device: torch.device,
        rules: PoolRules,
    ) -> None:
        self._rules = rules
        self.limits = limits
        self._ranking = EncoderRanking(source)
        self._client = FeatureClient(
            limits, tower=tower, device=device, silence_s=self._rules.silence_s
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pool", daemon=True)
        self._thread.start()

    @property
    def workspace_bytes(self) -> int:
        return self._client.workspace_bytes

    def warm_up(self) -> None:
        """Does nothing: encoders check their memory at their own start."""

    def submit(self, image: PreparedImage) -> Future[Tensor]:
        """GenerationFailedError: the image cannot be encoded, or not in time."""
        features: Future[Tensor] = Future()
        encoding = asyncio.run_coroutine_threadsafe(self._resolve(image, features), self._loop)
        features.add_done_callback(lambda ended: encoding.cancel() if ended.cancelled() else None)
        return features

    def close(self) -> None:
        """Cancels the futures of images that are not encoded yet."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)
        self._loop.close()

    async def _resolve(self, image: PreparedImage, future: Future[Tensor]) -> None:
        try:
            features = await self._features(image)
        except asyncio.CancelledError:
            future.cancel()
            raise
        except Exception as error:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        else:
            if future.set_running_or_notify_cancel():
                future.set_result(features)

    async def _features(self, image: PreparedImage) -> Tensor:
        attempts = _Attempts(self._rules)
        try:
            async with asyncio.timeout(self._rules.timeout_s) as limit:

                def restart() -> None:
                    limit.reschedule(self._loop.time() + self._rules.timeout_s)

                while True:
                    for address in await self._ranking.ranked(image.digest):
                        try:
                            return await self._client.features(address, image, heard=restart)
                        except (ConnectionLost, EngineDeadError, OverloadedError) as error:
                            self._ranking.avoid(address)
                            attempts.note(error)
                    self._ranking.expire()
                    await attempts.pause()
        except TimeoutError:
            raise attempts.timed_out() from None

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self._client.close()


class _Attempts:
    """The failed attempts to encode one image."""

    def __init__(self, rules: PoolRules) -> None:
        self._rules = rules
        self._pauses = Pauses(rules.pause_s, rules.longest_pause_s)
        self._lost = 0
        self._last: Exception | None = None

    def note(self, error: Exception) -> None:
        """GenerationFailedError once too many encoders were lost while they worked on it."""
        self._last = error
        self._lost += isinstance(error, ConnectionLost) and error.at_work
        if self._lost >= self._rules.max_lost:
            raise GenerationFailedError(
                f"{self._lost} vision encoders were lost while they worked on it: {error}"
            )

    async def pause(self) -> None:
        await asyncio.sleep(self._pauses.take())

    def timed_out(self) -> GenerationFailedError:
        reason = "" if self._last is None else f" The last error: {self._last}"
        return GenerationFailedError(
            f"no vision encoder has answered for {self._rules.timeout_s:g} seconds "
            f"(`vision.timeout_s`).{reason}"
        )

"""The longest gap of text streams while images, prompts or nothing arrive."""

import asyncio
import io
import itertools
import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing, closing
from pathlib import Path

import numpy as np
from PIL import Image

from bench.contender import Isolated
from bench.report import Row
from bench.vision_model import VisionModelShape
from model_zoo.chat.messages import ImagePart, Message
from runtime.engine.request import SamplingParams
from serve_app.config.settings import ModelSettings
from serve_app.gateway.tasks import ChatTask, Conversation, RawText
from serve_app.replica.loading import load_replica

STREAMS = 8
ARRIVALS = 8
ARRIVAL_TOKENS = 4
CONTEXT_TOKENS = 2048
PATIENCE_S = 600.0
TARGET_GAP_MS = 250.0
TARGETED = f"longest gap beside prompts, `target_gap_ms: {TARGET_GAP_MS:.0f}`, otherwise null"


class VisionReplica:
    """A replica of a vision model that runs text streams while other requests arrive."""

    def __init__(
        self,
        path: Path,
        threads: int,
        shape: VisionModelShape,
        target_gap_ms: float | None = None,
    ) -> None:
        self._shape = shape
        self._replica = load_replica(
            ModelSettings(
                name="replica",
                source=str(path),
                device="cpu",
                threads=threads,
                context_tokens=CONTEXT_TOKENS,
                max_sequences=STREAMS + ARRIVALS,
                prefix_cache=False,
                target_gap_ms=target_gap_ms,
            )
        )
        self._seeds = itertools.count()

    def gap_beside_images(self) -> tuple[float, float]:
        """The longest gap in seconds, and the time that the images took."""
        return asyncio.run(self._longest_gap(self._images()))

    def gap_beside_prompts(self) -> float:
        """The same with prompts as long as those images."""
        return asyncio.run(self._longest_gap(self._prompts()))[0]

    def gap_alone(self, seconds: float) -> float:
        """The longest gap without other requests, over this time."""
        return asyncio.run(self._longest_gap(asyncio.sleep(seconds)))[0]

    @property
    def encoded(self) -> int:
        """The number of images that have been encoded."""
        return self._replica.statistics().images_encoded_total

    def close(self) -> None:
        self._replica.close()

    async def _longest_gap(self, arrival: Coroutine[None, None, None]) -> tuple[float, float]:
        """The longest gap of any stream, after the start of the last one."""
        gaps = _Gaps(STREAMS)
        streams = [asyncio.create_task(self._stream(gaps, index)) for index in range(STREAMS)]
        async with asyncio.timeout(PATIENCE_S):
            await gaps.all_begun.wait()
            gaps.forget()
            started = time.perf_counter()
            await arrival
            took = time.perf_counter() - started
        longest = gaps.longest()
        assert not any(stream.done() for stream in streams), "a stream was too short"
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        return longest, took

    async def _stream(self, gaps: "_Gaps", index: int) -> None:
        task = self._task(RawText(f"Stream {index} of {next(self._seeds)}:"), None)
        async with aclosing(self._replica.generate(task)) as deltas:
            async for delta in deltas:
                if delta.tokens:
                    gaps.saw(index)

    async def _images(self) -> None:
        side = self._shape.image_side
        await self._arrive(
            lambda seed: Conversation((Message("user", (ImagePart(_photo(seed, side)), "What?")),))
        )

    async def _prompts(self) -> None:
        await self._arrive(lambda seed: RawText(f"{seed} " * (self._shape.rows_per_image // 4)))

    async def _arrive(self, prompt: Callable[[int], Conversation | RawText]) -> None:
        async def ask() -> None:
            task = self._task(prompt(10_000 + next(self._seeds)), ARRIVAL_TOKENS)
            async with aclosing(self._replica.generate(task)) as deltas:
                async for _ in deltas:
                    pass

        await asyncio.gather(*(ask() for _ in range(ARRIVALS)))

    def _task(self, prompt: Conversation | RawText, tokens: int | None) -> ChatTask:
        greedy = SamplingParams(temperature=0.0)
        return ChatTask(str(next(self._seeds)), "replica", prompt, greedy, tokens)


class _Gaps:
    """The time of the last output of each stream."""

    def __init__(self, streams: int) -> None:
        self.all_begun = asyncio.Event()
        self._seen: dict[int, float] = {}
        self._streams = streams
        self._longest = 0.0

    def saw(self, stream: int) -> None:
        now = time.perf_counter()
        self._longest = max(self._longest, now - self._seen.get(stream, now))
        self._seen[stream] = now
        if len(self._seen) == self._streams:
            self.all_begun.set()

    def forget(self) -> None:
        """Ignore everything before this moment."""
        self._seen = dict.fromkeys(self._seen, time.perf_counter())
        self._longest = 0.0

    def longest(self) -> float:
        """Includes the gap that lasts until now."""
        now = time.perf_counter()
        return max((self._longest, *(now - seen for seen in self._seen.values())))


class _IsolatedVisionReplica(Isolated):
    def gap_beside_images(self) -> tuple[float, float]:
        return self._call("gap_beside_images")

    def gap_beside_prompts(self) -> float:
        return self._call("gap_beside_prompts")

    def gap_alone(self, seconds: float) -> float:
        return self._call("gap_alone", seconds)


def gap_rows(path: Path, threads: int, shape: VisionModelShape, rounds: int) -> list[Row]:
    """The longest gap with images, relative to that with nothing and with prompts; and with
    prompts under a target, relative to that without one."""
    print("longest gaps: streams of text while images arrive", flush=True)
    images, alone, prompts, limited = [], [], [], []
    setting = (VisionReplica, path, threads, shape)
    with (
        closing(_IsolatedVisionReplica(*setting)) as replica,
        closing(_IsolatedVisionReplica(*setting, TARGET_GAP_MS)) as targeted,
    ):
        for _ in range(rounds):
            gap, seconds = replica.gap_beside_images()
            images.append(1000 * gap)
            alone.append(1000 * replica.gap_alone(seconds))
            prompts.append(1000 * replica.gap_beside_prompts())
            limited.append(1000 * targeted.gap_beside_prompts())
    return [
        Row("Q8_0", "longest gap, otherwise nothing", "ms", tuple(images), tuple(alone)),
        Row("Q8_0", "longest gap, otherwise prompts", "ms", tuple(images), tuple(prompts)),
        Row("Q8_0", TARGETED, "ms", tuple(limited), tuple(prompts)),
    ]


def _photo(seed: int, side: int) -> bytes:
    """A PNG of smooth colours with noise; all are different."""
    random = np.random.default_rng(seed)
    small = Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    smooth = np.asarray(small.resize((2 * side, side), Image.Resampling.BICUBIC), np.int16)
    noise = random.integers(-8, 9, smooth.shape)
    data = io.BytesIO()
    Image.fromarray(np.clip(smooth + noise, 0, 255).astype(np.uint8)).save(data, "PNG")
    return data.getvalue()

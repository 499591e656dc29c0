"""How long streams of text stand still while images arrive, and while nothing or text does."""

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
from bench.seeing_model import EyesShape
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


class Seeing:
    """A replica of a model with vision; streams of text run in it while something arrives."""

    def __init__(self, path: Path, threads: int, shape: EyesShape) -> None:
        self._shape = shape
        self._replica = load_replica(
            ModelSettings(
                name="seeing",
                source=str(path),
                device="cpu",
                threads=threads,
                context_tokens=CONTEXT_TOKENS,
                max_sequences=STREAMS + ARRIVALS,
                prefix_cache=False,
            )
        )
        self._seeds = itertools.count()

    def gap_beside_images(self) -> tuple[float, float]:
        """The longest gap in seconds, and how long the arriving images took."""
        return asyncio.run(self._longest_gap(self._images()))

    def gap_beside_prompts(self) -> float:
        """The same beside prompts as long as those images."""
        return asyncio.run(self._longest_gap(self._prompts()))[0]

    def gap_alone(self, seconds: float) -> float:
        """The same beside nothing, for so long."""
        return asyncio.run(self._longest_gap(asyncio.sleep(seconds)))[0]

    @property
    def encoded(self) -> int:
        """How many images have been encoded so far."""
        return self._replica.statistics().images_encoded_total

    def close(self) -> None:
        self._replica.close()

    async def _longest_gap(self, arrival: Coroutine[None, None, None]) -> tuple[float, float]:
        """Of any of the streams, from the moment when the last of them had begun."""
        gaps = _Gaps(STREAMS)
        streams = [asyncio.create_task(self._stream(gaps, index)) for index in range(STREAMS)]
        async with asyncio.timeout(PATIENCE_S):
            await gaps.all_begun.wait()
            gaps.forget()
            begun = time.perf_counter()
            await arrival
            took = time.perf_counter() - begun
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
        return ChatTask(str(next(self._seeds)), "seeing", prompt, greedy, tokens)


class _Gaps:
    """When each of several streams was last seen to go on."""

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
        """What lies before this moment does not count."""
        self._seen = dict.fromkeys(self._seen, time.perf_counter())
        self._longest = 0.0

    def longest(self) -> float:
        """With what has lasted until now."""
        now = time.perf_counter()
        return max((self._longest, *(now - seen for seen in self._seen.values())))


class _IsolatedSeeing(Isolated):
    def gap_beside_images(self) -> tuple[float, float]:
        return self._call("gap_beside_images")

    def gap_beside_prompts(self) -> float:
        return self._call("gap_beside_prompts")

    def gap_alone(self, seconds: float) -> float:
        return self._call("gap_alone", seconds)


def gap_rows(path: Path, threads: int, shape: EyesShape, rounds: int) -> list[Row]:
    """The longest gap beside images, as a ratio to that beside nothing and beside prompts."""
    print("longest gaps: streams of text while images arrive", flush=True)
    images, alone, prompts = [], [], []
    with closing(_IsolatedSeeing(Seeing, path, threads, shape)) as seeing:
        for _ in range(rounds):
            gap, seconds = seeing.gap_beside_images()
            images.append(1000 * gap)
            alone.append(1000 * seeing.gap_alone(seconds))
            prompts.append(1000 * seeing.gap_beside_prompts())
    return [
        Row("Q8_0", "longest gap, otherwise nothing", "ms", tuple(images), tuple(alone)),
        Row("Q8_0", "longest gap, otherwise prompts", "ms", tuple(images), tuple(prompts)),
    ]


def _photo(seed: int, side: int) -> bytes:
    """PNG: smooth colours under noise, no two alike."""
    random = np.random.default_rng(seed)
    small = Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    smooth = np.asarray(small.resize((2 * side, side), Image.Resampling.BICUBIC), np.int16)
    noise = random.integers(-8, 9, smooth.shape)
    data = io.BytesIO()
    Image.fromarray(np.clip(smooth + noise, 0, 255).astype(np.uint8)).save(data, "PNG")
    return data.getvalue()

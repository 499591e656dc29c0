"""A replica with running streams, to which images and prompts arrive."""

import asyncio
import io
import itertools
import os
import random
import threading
import time
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from model_zoo.chat.messages import ImagePart, Message
from runtime.engine.request import SamplingParams
from serve_app.config.settings import ModelSettings, VisionSettings
from serve_app.messages.tasks import ChatTask, Conversation, PromptSource, RawText, TokenIds
from serve_app.replica.loading import load_encoder, load_replica
from serve_app.transport.wire import Address
from serve_app.vision.feature_transfer import feature_server

STREAMS = 8
ARRIVAL_TOKENS = 4
CONTEXT_TOKENS = 4096
MOST_ARRIVALS = 8
PLAIN_TOKENS = range(100, 250)  # ordinary text in all of these models
LOOPBACK = "127.0.0.1"
PATIENCE_S = 600.0


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds: all gaps of the streams, and the times to the first token of arrived requests."""

    gaps: tuple[float, ...]
    first_tokens: tuple[float, ...]


class GapReplica:
    """Runs streams of text while other requests arrive. `cpus`: the processors of this process.
    `encoder`: the address of a vision encoder; None encodes images in this process."""

    def __init__(
        self,
        path: Path,
        cpus: Sequence[int],
        target_gap_ms: float | None = None,
        encoder: Address | None = None,
    ) -> None:
        os.sched_setaffinity(0, cpus)
        vision = VisionSettings() if encoder is None else VisionSettings(placement="pool")
        settings = ModelSettings(
            name="replica",
            source=str(path),
            device="cpu",
            threads=len(cpus),
            context_tokens=CONTEXT_TOKENS,
            max_sequences=STREAMS + MOST_ARRIVALS,
            cache_tokens=(STREAMS + MOST_ARRIVALS) * CONTEXT_TOKENS // 2,
            prefix_cache=False,
            target_gap_ms=target_gap_ms,
            vision=vision,
        )
        self._replica = load_replica(settings, None if encoder is None else OneEncoder(encoder))
        self._seeds = itertools.count()

    def beside_images(self, count: int, side: int) -> Waits:
        """`count` large pictures, all different, arrive at the same time."""
        pictures = [_photo(10_000 + next(self._seeds), side) for _ in range(count)]
        return asyncio.run(self._waits(self._at_once([_question(each) for each in pictures])))

    def beside_prompts(self, count: int, tokens: int) -> Waits:
        """`count` prompts of `tokens` tokens arrive at the same time."""
        prompts = [self._prompt(tokens) for _ in range(count)]
        return asyncio.run(self._waits(self._at_once(prompts)))

    def beside_clients(self, clients: int, each: int, tokens: int) -> Waits:
        """`clients` clients send `each` prompts of `tokens` tokens, one after the other."""
        prompts = [[self._prompt(tokens) for _ in range(each)] for _ in range(clients)]
        return asyncio.run(self._waits(self._in_turn(prompts)))

    def alone(self, seconds: float) -> Waits:
        return asyncio.run(self._waits(_nothing(seconds)))

    @property
    def encoded(self) -> int:
        """The number of images that have been encoded."""
        return self._replica.statistics().images_encoded_total

    def close(self) -> None:
        self._replica.close()

    async def _waits(self, arrival: Coroutine[None, None, list[float]]) -> Waits:
        """Starts the streams, then runs `arrival` and measures."""
        gaps = Gaps(STREAMS)
        streams = [asyncio.create_task(self._stream(gaps, index)) for index in range(STREAMS)]
        async with asyncio.timeout(PATIENCE_S):
            await gaps.all_begun.wait()
            gaps.forget()
            first_tokens = await arrival
        found = gaps.found()
        failures = [stream.exception() for stream in streams if stream.done()]
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        assert not failures, failures
        return Waits(tuple(found), tuple(first_tokens))

    async def _stream(self, gaps: "Gaps", index: int) -> None:
        """Requests one answer after the other."""
        while True:
            task = self._task(RawText(f"Stream {index} of {next(self._seeds)}:"), None)
            async with aclosing(self._replica.generate(task)) as deltas:
                async for delta in deltas:
                    if delta.tokens:
                        gaps.saw(index)
            gaps.ended(index)

    async def _at_once(self, prompts: Sequence[PromptSource]) -> list[float]:
        return await asyncio.gather(*map(self._ask, prompts))

    async def _in_turn(self, clients: Sequence[Sequence[PromptSource]]) -> list[float]:
        async def one(prompts: Sequence[PromptSource]) -> list[float]:
            return [await self._ask(prompt) for prompt in prompts]

        return list(itertools.chain(*await asyncio.gather(*map(one, clients))))

    async def _ask(self, prompt: PromptSource) -> float:
        """The seconds to the first token."""
        begun, first = time.perf_counter(), None
        task = self._task(prompt, ARRIVAL_TOKENS)
        async with aclosing(self._replica.generate(task)) as deltas:
            async for delta in deltas:
                if delta.tokens and first is None:
                    first = time.perf_counter() - begun
        assert first is not None, "no token came"
        return first

    def _prompt(self, tokens: int) -> TokenIds:
        draw = random.Random(10_000 + next(self._seeds))
        return TokenIds(tuple(draw.choices(PLAIN_TOKENS, k=tokens)))

    def _task(self, prompt: PromptSource, tokens: int | None) -> ChatTask:
        greedy = SamplingParams(temperature=0.0)
        return ChatTask(str(next(self._seeds)), "replica", prompt, greedy, tokens)


class OneEncoder:
    """See `EncoderSource`."""

    def __init__(self, address: Address) -> None:
        self._address = address

    async def addresses(self) -> Sequence[Address]:
        return [self._address]


class EncoderProcess:
    """A vision encoder in this process, reached over the loopback interface as in a pool."""

    def __init__(self, path: Path, cpus: Sequence[int]) -> None:
        os.sched_setaffinity(0, cpus)
        vision = VisionSettings(placement="pool", threads=len(cpus))
        settings = ModelSettings(name="encoder", source=str(path), device="cpu", vision=vision)
        self._encoder = load_encoder(settings)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        starting = feature_server(self._encoder).start(LOOPBACK)
        self._address = asyncio.run_coroutine_threadsafe(starting, self._loop).result()

    def address(self) -> Address:
        return self._address

    def close(self) -> None:
        self._encoder.close()


class Gaps:
    """The times between the outputs of each stream."""

    def __init__(self, streams: int) -> None:
        self.all_begun = asyncio.Event()
        self._seen: dict[int, float] = {}
        self._streams = streams
        self._gaps: list[float] = []

    def saw(self, stream: int) -> None:
        now = time.perf_counter()
        if stream in self._seen:
            self._gaps.append(now - self._seen[stream])
        self._seen[stream] = now
        if len(self._seen) == self._streams:
            self.all_begun.set()

    def ended(self, stream: int) -> None:
        """The next output of the stream begins another answer."""
        self._seen.pop(stream, None)

    def forget(self) -> None:
        """Discards all gaps before this moment."""
        self._seen = dict.fromkeys(self._seen, time.perf_counter())
        self._gaps.clear()

    def found(self) -> list[float]:
        """All gaps, including those that last until now."""
        now = time.perf_counter()
        return [*self._gaps, *(now - seen for seen in self._seen.values())]


async def _nothing(seconds: float) -> list[float]:
    await asyncio.sleep(seconds)
    return []


def _question(picture: bytes) -> Conversation:
    return Conversation((Message("user", (ImagePart(picture), "What?")),))


def _photo(seed: int, side: int) -> bytes:
    """A PNG of smooth colours with noise; all are different."""
    draw = np.random.default_rng(seed)
    small = Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    smooth = np.asarray(small.resize((2 * side, side), Image.Resampling.BICUBIC), np.int16)
    noise = draw.integers(-8, 9, smooth.shape)
    data = io.BytesIO()
    Image.fromarray(np.clip(smooth + noise, 0, 255).astype(np.uint8)).save(data, "PNG")
    return data.getvalue()

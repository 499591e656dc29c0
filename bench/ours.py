"""This project's engine without Ray: a model and its `AsyncEngine`."""

import asyncio
import itertools
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import torch

from bench.contender import TEMPERATURE, TOP_K, TOP_P, Clock, Decoding, Scored, Setting
from model_zoo.chat_model import ChatModel
from model_zoo.registry import LoadOptions, load
from runtime.engine.assembly import assemble
from runtime.engine.async_engine import AsyncEngine
from runtime.engine.engine_options import EngineOptions
from runtime.engine.request import Delta, FinishReason, GenerationRequest, SamplingParams, StopRules
from runtime.kv.cache_types import default_cache_type
from runtime.quant.weight import Compute
from serve_app.replica.device_setup import tiling_options

SAMPLING = SamplingParams(temperature=TEMPERATURE, top_k=TOP_K, top_p=TOP_P, seed=1)
_CPU = torch.device("cpu")


def load_model(path: Path, compute: Compute = Compute.AUTO) -> ChatModel:
    """The model as a server loads it for a CPU."""
    options = LoadOptions(compute=compute, tiling=tiling_options("auto"))
    return load(path, device=_CPU, dtype=torch.float32, options=options)


def start_engine(
    model: ChatModel, options: EngineOptions, *, draft: ChatModel | None = None
) -> AsyncEngine:
    """An engine with a cache of a server's type, whatever `options` say of it. `draft`: a draft
    model."""
    options = replace(options, kv_dtype=default_cache_type(_CPU, generates=True))
    engine, _ = assemble(
        model.decoder,
        model.tokenizer.token_bytes,
        device=_CPU,
        options=options,
        draft=None if draft is None else draft.decoder,
    )
    engine.start()
    return engine


class Caravan:
    """An engine on CPU threads of this process; `compute` is by default that of a server."""

    def __init__(self, path: Path, setting: Setting, compute: Compute = Compute.AUTO) -> None:
        torch.set_num_threads(setting.threads)
        options = EngineOptions(
            context_tokens=setting.context_tokens,
            max_sequences=setting.sequences,
            step_tokens=setting.step_tokens,
            cache_tokens=setting.context_tokens * setting.sequences,
        )
        self._engine = start_engine(load_model(path, compute), options)
        self._ids = map(str, itertools.count())

    def prefill(self, prompt: Sequence[int]) -> float:
        return asyncio.run(self._first_token(prompt))

    def decode(self, prompts: Sequence[Sequence[int]], tokens: int) -> Decoding:
        return asyncio.run(self._answer_all(prompts, tokens))

    def most_likely(self, prompt: Sequence[int], count: int) -> dict[int, float]:
        return asyncio.run(self._alternatives(prompt, count))

    def score(self, text: Sequence[int], count: int) -> list[Scored]:
        request = replace(self._request(text, 0), prompt_logprobs=count)
        return [
            Scored(sampled.token, sampled.logprob, {e.token: e.logprob for e in sampled.top})
            for delta in asyncio.run(self._deltas(request))
            for sampled in delta.prompt_logprobs
            if sampled.logprob is not None
        ]

    def answer(self, prompt: Sequence[int], tokens: int) -> list[int]:
        request = self._request(prompt, tokens, SamplingParams(temperature=0.0))
        return [token for delta in asyncio.run(self._deltas(request)) for token in delta.tokens]

    def turns(
        self, prompt: Sequence[int], answer_tokens: int, more: Sequence[int]
    ) -> tuple[float, float]:
        """The seconds to the first token of two turns of a conversation. The second prompt is
        `prompt`, its answer and `more`."""
        first = asyncio.run(self._first_token(prompt))
        answer = self.answer(prompt, answer_tokens)
        return first, asyncio.run(self._first_token([*prompt, *answer, *more]))

    def close(self) -> None:
        self._engine.close()

    async def _first_token(self, prompt: Sequence[int]) -> float:
        begin = time.perf_counter()
        async with aclosing(self._engine.stream(self._request(prompt, 1))) as deltas:
            async for delta in deltas:
                _check(delta)
                if delta.tokens:
                    return time.perf_counter() - begin
        raise AssertionError("no token came")

    async def _answer_all(self, prompts: Sequence[Sequence[int]], tokens: int) -> Decoding:
        clock = Clock(len(prompts))

        async def answer(sequence: int, prompt: Sequence[int]) -> None:
            async with aclosing(self._engine.stream(self._request(prompt, tokens))) as deltas:
                async for delta in deltas:
                    _check(delta)
                    if delta.tokens:
                        clock.saw(sequence, len(delta.tokens))

        await asyncio.gather(*(answer(*item) for item in enumerate(prompts)))
        return clock.stop()

    async def _alternatives(self, prompt: Sequence[int], count: int) -> dict[int, float]:
        request = self._request(prompt, 1, SamplingParams(temperature=0.0, logprobs=count))
        async with aclosing(self._engine.stream(request)) as deltas:
            async for delta in deltas:
                _check(delta)
                for sampled in delta.logprobs:
                    return {entry.token: entry.logprob for entry in sampled.top}
        raise AssertionError("no log-probabilities came")

    async def _deltas(self, request: GenerationRequest) -> list[Delta]:
        async with aclosing(self._engine.stream(request)) as stream:
            deltas = [delta async for delta in stream]
        for delta in deltas:
            _check(delta)
        return deltas

    def _request(
        self, prompt: Sequence[int], tokens: int, sampling: SamplingParams = SAMPLING
    ) -> GenerationRequest:
        return GenerationRequest(next(self._ids), tuple(prompt), StopRules(tokens), sampling)


def _check(delta: Delta) -> None:
    assert delta.finish is not FinishReason.FAILED, delta.error

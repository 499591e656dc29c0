"""Engines over tiny models, the requests that tests send to them, and their whole answers."""

import asyncio
import contextlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import Gemma3TextConfig

from model_zoo.chat_model import ChatModel
from model_zoo.registry import load
from runtime.engine.assembly import assemble
from runtime.engine.async_engine import AsyncEngine
from runtime.engine.engine_options import EngineOptions
from runtime.engine.request import Delta, GenerationRequest, SamplingParams, StopRules
from runtime.vision.encoder import ImageEncoder
from tests.families.text_families import TEXT_MODELS

CPU = torch.device("cpu")
WINDOW = 16
# Two layers of three see a window, which is shorter than nearly every prompt.
SLIDING = Gemma3TextConfig(
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    query_pre_attn_scalar=16,
    intermediate_size=96,
    max_position_embeddings=512,
    sliding_window=WINDOW,
    sliding_window_pattern=3,
)


# Families with each kind of recurrent state, and their configurations: beside attention in a layer,
# in layers of its own, of which one is the last, of heads that share what is projected, and of the
# last tokens.
RECURRENT = {
    "falcon-h1": "plain",
    "lfm2": "plain",
    "nemotron_h": "recurrent_last_layer",
    "plamo2": "attention_last_without_window_tied",
    "qwen35moe": "plain",
    "qwen4exp_with_choice": "plain",
}


def hybrid(family: str, config: str, folder: Path) -> tuple:
    """A model with recurrent layers."""
    path = folder / "hybrid.gguf"
    twin = TEXT_MODELS[family].write(path, config)
    return load(path, device=CPU, dtype=torch.float32), twin


@contextlib.contextmanager
def running(
    model: ChatModel,
    *,
    draft: ChatModel | None = None,
    encoder: ImageEncoder | None = None,
    **options,
) -> Iterator[AsyncEngine]:
    settings = {"context_tokens": 256, "max_sequences": 8, "step_tokens": 32, **options}
    engine, _ = assemble(
        model.decoder,
        model.tokenizer.token_bytes,
        device=CPU,
        options=EngineOptions(**settings),
        draft=None if draft is None else draft.decoder,
        encoder=encoder,
    )
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


async def collect(
    engine: AsyncEngine, request: GenerationRequest, deltas: int | None = None
) -> Delta:
    """The answer; of a client that leaves after so many `deltas`, its beginning."""
    merged, count = Delta(), 0
    async with contextlib.aclosing(engine.stream(request)) as stream:
        async for delta in stream:
            merged, count = merged.merged(delta), count + 1
            if count == deltas:
                break
    return merged


def answers(engine: AsyncEngine, requests: Sequence[GenerationRequest], *, together: bool):
    async def main() -> list[Delta]:
        if together:
            return await asyncio.gather(*[collect(engine, request) for request in requests])
        return [await collect(engine, request) for request in requests]

    return asyncio.run(main())


def mixed_requests(vocab_size: int) -> list[GenerationRequest]:
    """Prompts that share prefixes, and every way to sample."""
    r = random.Random(7)
    base = tuple(r.randrange(vocab_size) for _ in range(60))
    ways = [
        SamplingParams(temperature=0),
        SamplingParams(seed=1),
        SamplingParams(top_k=0, top_p=1.0, seed=2),
        SamplingParams(top_k=0, top_p=0.8, seed=3, logprobs=3),
        SamplingParams(min_p=0.1, seed=4),
        SamplingParams(repeat_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2, seed=5),
    ]
    requests = []
    for number in range(24):
        shared = r.choice([0, 20, 48])
        own = tuple(r.randrange(vocab_size) for _ in range(r.randint(1, 70)))
        stop = StopRules(r.randint(5, 40))
        sampling = ways[number % len(ways)]
        requests.append(GenerationRequest(str(number), base[:shared] + own, stop, sampling))
    return requests

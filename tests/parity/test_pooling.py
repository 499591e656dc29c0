"""Vectors of texts from the whole engine against `transformers`, alone and beside other
requests."""

import asyncio
import contextlib

import numpy as np
import pytest
import torch
from transformers import AutoModel, BertConfig, Qwen3Config

from model_zoo.registry import load
from runtime.engine.request import (
    FinishReason,
    GenerationRequest,
    ImageSpan,
    Pooling,
    SamplingParams,
    StopRules,
)
from runtime.errors import PromptTooLongError
from tests.families.agreement import random_tokens
from tests.families.engine_runs import collect, running
from tests.tiny_models import write_tiny

CPU = torch.device("cpu")
TOLERANCE = 2e-5
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    config = Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16)
    twin = write_tiny(path, config)
    return load(path, device=CPU, dtype=torch.float32), twin.model


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    twin = write_tiny(path, BertConfig(**SIZES), maker=AutoModel)
    return load(path, device=CPU, dtype=torch.float32), twin


def expected(twin, tokens: list[int], pooling: Pooling) -> np.ndarray:
    with torch.inference_mode():
        states = twin(torch.tensor([tokens])).last_hidden_state[0]
    row = {Pooling.MEAN: states.mean(0), Pooling.CLS: states[0], Pooling.LAST: states[-1]}
    return row[pooling].numpy()


def asked(id: str, tokens: list[int], pooling: Pooling, *, whole: bool = False):
    spans = (ImageSpan(0, len(tokens), whole=True, digest=b""),) if whole else ()
    return GenerationRequest(id, tuple(tokens), StopRules(1), spans=spans, pooling=pooling)


async def vector(engine, request: GenerationRequest) -> np.ndarray:
    delta = await collect(engine, request)
    assert (delta.finish, delta.tokens, delta.text) == (FinishReason.STOP, (), "")
    assert delta.usage.prompt_tokens == len(request.prompt)
    assert delta.usage.completion_tokens == 0
    return np.frombuffer(delta.vector, dtype="<f4")


@pytest.mark.parametrize("pooling", Pooling)
@pytest.mark.parametrize("length", [1, 31, 32, 33, 100, 256])
async def test_a_decoders_vector_agrees_over_any_number_of_steps(decoder, pooling, length) -> None:
    model, twin = decoder
    tokens = random_tokens(length, seed=length)
    with running(model) as engine:
        found = await vector(engine, asked("a", tokens, pooling))
    assert np.abs(found - expected(twin, tokens, pooling)).max() <= TOLERANCE


@pytest.mark.parametrize("pooling", Pooling)
async def test_the_bits_of_a_vector_do_not_depend_on_steps_and_other_requests(
    decoder, pooling
) -> None:
    model, _ = decoder
    texts = [random_tokens(length, seed=length) for length in (100, 77, 31)]
    found = []
    for step_tokens in (13, 40, 256):
        with running(model, step_tokens=step_tokens) as engine:
            work = [vector(engine, asked(f"t{i}", t, pooling)) for i, t in enumerate(texts)]
            found.append([each.tobytes() for each in await asyncio.gather(*work)])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("pooling", Pooling)
@pytest.mark.parametrize("length", [1, 64, 128])
async def test_an_encoders_vector_agrees(encoder, pooling, length) -> None:
    model, twin = encoder
    tokens = random_tokens(length, seed=length)
    with running(model, step_tokens=128) as engine:
        found = await vector(engine, asked("a", tokens, pooling, whole=True))
    assert np.abs(found - expected(twin, tokens, pooling)).max() <= TOLERANCE


@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_a_crowd_of_texts_and_chats_changes_no_vector_and_no_token(decoder, depth) -> None:
    model, twin = decoder
    texts = [random_tokens(3 + 17 * i % 90, seed=i) for i in range(20)]
    poolings = [list(Pooling)[i % 3] for i in range(20)]
    chats = [
        GenerationRequest(f"c{i}", tuple(text), StopRules(12), SamplingParams(temperature=0))
        for i, text in enumerate(texts[:6])
    ]
    with running(model, cache_tokens=512, depth=depth) as engine:
        alone = [await collect(engine, chat) for chat in chats]
        work = [vector(engine, asked(f"t{i}", t, poolings[i])) for i, t in enumerate(texts)]
        again = [collect(engine, chat) for chat in chats]
        *vectors, crowd = await asyncio.gather(*work, asyncio.gather(*again))
    for text, pooling, found in zip(texts, poolings, vectors, strict=True):
        assert np.abs(found - expected(twin, text, pooling)).max() <= TOLERANCE
    assert [delta.tokens for delta in crowd] == [delta.tokens for delta in alone]


async def test_a_vector_is_made_of_all_rows_after_a_chat_with_the_same_beginning(decoder) -> None:
    model, twin = decoder
    tokens = random_tokens(90, seed=7)
    with running(model) as engine:
        await collect(engine, GenerationRequest("c", tuple(tokens), StopRules(4)))
        found = await vector(engine, asked("t", tokens, Pooling.MEAN))
        delta = await collect(engine, asked("u", tokens, Pooling.MEAN))
    assert delta.usage.cached_tokens == 0
    assert np.abs(found - expected(twin, tokens, Pooling.MEAN)).max() <= TOLERANCE


async def test_a_text_fills_the_context_and_no_more(decoder) -> None:
    model, _ = decoder
    with running(model) as engine:
        with pytest.raises(PromptTooLongError, match=r"257 tokens; the context holds 256\."):
            await vector(engine, asked("a", random_tokens(257, seed=1), Pooling.LAST))
        async with contextlib.aclosing(
            engine.stream(asked("b", random_tokens(256, seed=1), Pooling.LAST))
        ) as deltas:
            assert (await anext(deltas)).finish is FinishReason.STOP

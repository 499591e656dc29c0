"""Engines over several processes answer as one process does, and fail when a process ends."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model_zoo.registry import load
from model_zoo.tokenizers.tokenizer import Tokenizer
from runtime.distributed.control_channel import RankZero
from runtime.engine.async_engine import AsyncEngine
from runtime.engine.request import (
    ContextShift,
    Delta,
    FinishReason,
    GenerationRequest,
    ImageSpan,
    Pooling,
    Result,
    SamplingParams,
    StopRules,
)
from runtime.errors import DoesNotFitError, EngineDeadError, ModelFileError
from runtime.vision.encoder import LocalEncoder
from runtime.worker.runner import DeviceRunner
from tests.families.engine_runs import SLIDING, answers, mixed_requests, running
from tests.families.text_families import TEXT_MODELS
from tests.parity.vision import test_engine_vision
from tests.parity.vision.image_text_models import mllama
from tests.patience import HANG_S
from tests.rank_processes import CPU, HOST, Follower, assembled, divided_engine, followers
from tests.tiny_models import write_tiny, write_tiny_llama
from tests.unit.runtime.vision.fake_tower import PretendTower, picture

EXPERTS = TEXT_MODELS["qwen3moe"].config(moe_intermediate_size=64)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """One thread for each rank, so that ranks do not wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def three() -> Iterator[list[Follower]]:
    """Follower processes that several tests use in turn."""
    with followers(3) as processes:
        yield processes


def write_llama(path: Path) -> None:
    write_tiny_llama(path, config="llama3_rope")


def write_blocks(path: Path) -> None:
    """A row is one block, so ranks can divide matrices by outputs only."""
    write_tiny_llama(path, config="rows_of_256", type="Q4_K", overrides={"attn_v": "Q8_0"})


def write_sliding(path: Path) -> None:
    write_tiny(path, SLIDING, type="q8_0")


def write_experts(path: Path) -> None:
    write_tiny(path, EXPERTS, type="q8_0")


@pytest.mark.parametrize(
    "write, size, depth, count",
    [
        (write_llama, 2, 1, 12),
        (write_llama, 4, 2, 6),
        (write_blocks, 2, 2, 6),
        (write_sliding, 2, 2, 12),
        (write_experts, 4, 1, 5),
    ],
)
def test_requests_in_a_batch_get_the_answers_of_one_rank(
    tmp_path, three, write, size: int, depth: int, count: int
) -> None:
    """Prompts longer than a step, repeated prefixes, and too few pages for all requests."""
    write(tmp_path / "tiny.gguf")
    model = load(tmp_path / "tiny.gguf", device=CPU, dtype=torch.float32)
    requests = mixed_requests(model.tokenizer.vocab_size)[:count]
    with running(model) as engine:
        alone = answers(engine, requests, together=True)
    options = {"depth": depth, "cache_tokens": 256}
    with divided_engine(tmp_path / "tiny.gguf", three[: size - 1], **options) as (_, engine):
        divided = answers(engine, requests, together=True)
    statistics = engine.statistics()
    assert [d.tokens for d in divided] == [d.tokens for d in alone]
    assert [d.text for d in divided] == [d.text for d in alone]
    if count == 12:
        assert statistics.cached_tokens_total > 0 and statistics.preemptions_total > 0


def test_pages_move_on_all_ranks(tmp_path, three) -> None:
    write_sliding(tmp_path / "tiny.gguf")
    model = load(tmp_path / "tiny.gguf", device=CPU, dtype=torch.float32)
    shift, prompt = ContextShift(64, keep=5), tuple(range(50, 110))
    requests = [
        GenerationRequest(str(n), prompt, StopRules(90), SamplingParams(seed=n % 2), shift=shift)
        for n in range(4)
    ]
    options = {"context_tokens": 64, "page_tokens": 4, "max_sequences": 3}
    with running(model, **options) as engine:
        alone = answers(engine, requests, together=True)
    with divided_engine(tmp_path / "tiny.gguf", three[:1], **options) as (_, engine):
        divided = answers(engine, requests, together=True)
    assert [d.tokens for d in divided] == [d.tokens for d in alone]
    assert engine.statistics().shifts_total >= 8 and engine.statistics().pages_owned == 0


def test_checkpoints_and_pages_of_the_host_are_copied_on_all_ranks(tmp_path, three) -> None:
    path = tmp_path / "tiny.gguf"
    TEXT_MODELS["qwen35"].write(path)
    prompts = [(50, 100), (50, 110), (150, 120), (20, 120), (50, 120)]
    turns = [
        GenerationRequest(
            str(number), tuple(range(a, a + n)), StopRules(8), SamplingParams(seed=number)
        )
        for number, (a, n) in enumerate(prompts)
    ]
    options = {"cache_tokens": 256, "host_cache_bytes": 2**22}
    with divided_engine(path, []) as (_, engine):
        alone = answers(engine, turns, together=False)
    with divided_engine(path, three[:1], **options) as (_, engine):
        divided = answers(engine, turns, together=False)
    assert [d.tokens for d in divided] == [d.tokens for d in alone]
    assert [d.usage.cached_tokens for d in divided if d.usage] == [0, 80, 0, 0, 80]
    assert engine.statistics().host_pages_restored_total > 0


def test_scores_of_prompts_are_those_of_one_rank(tmp_path, three) -> None:
    """Beside embeddings and requests that draw, in more blocks than one."""
    write_llama(tmp_path / "tiny.gguf")
    model = load(tmp_path / "tiny.gguf", device=CPU, dtype=torch.float32)
    scored = [
        replace(each, id=f"s{n}", prompt_logprobs=2, stop=StopRules(n % 3))
        for n, each in enumerate(mixed_requests(model.tokenizer.vocab_size)[:6])
    ]
    pooled = GenerationRequest("p", tuple(range(60)), StopRules(1), pooling=Pooling.MEAN)
    with running(model) as engine:
        alone = answers(engine, [*scored, pooled], together=True)
    with divided_engine(tmp_path / "tiny.gguf", three[:1]) as (_, engine):
        divided = answers(engine, [*scored, pooled], together=True)
    for one, other in zip(alone, divided, strict=True):
        assert one.tokens == other.tokens
        assert [each.token for each in one.prompt_logprobs] == [
            each.token for each in other.prompt_logprobs
        ]
        assert [each.logprob for each in one.prompt_logprobs] == pytest.approx(
            [each.logprob for each in other.prompt_logprobs], abs=1e-4
        )
    assert np.frombuffer(divided[-1].vector, "<f4") == pytest.approx(
        np.frombuffer(alone[-1].vector, "<f4"), abs=1e-4
    )


def test_embeddings_are_those_of_one_rank(tmp_path, three) -> None:
    write_llama(tmp_path / "tiny.gguf")
    model = load(tmp_path / "tiny.gguf", device=CPU, dtype=torch.float32)
    requests = [
        GenerationRequest(str(n), tuple(range(n, 3 * n)), StopRules(1), pooling=kind)
        for n, kind in ((20, Pooling.MEAN), (50, Pooling.LAST))
    ]
    with running(model) as engine:
        alone = [delta.vector for delta in answers(engine, requests, together=True)]
    with divided_engine(tmp_path / "tiny.gguf", three[:1]) as (_, engine):
        divided = [delta.vector for delta in answers(engine, requests, together=True)]
    for one, other in zip(alone, divided, strict=True):
        assert one is not None and other is not None
        ours, theirs = (torch.frombuffer(bytearray(v), dtype=torch.float32) for v in (one, other))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_images_in_the_text_reach_all_ranks(tmp_path, three) -> None:
    """With deepstack features of the first layer, and positions in rows and columns."""
    path = tmp_path / "tiny.gguf"
    TEXT_MODELS["qwen3vl"].write(path)
    width = 2 * load(path, device=CPU, dtype=torch.float32).decoder.hidden_size
    requests = [about_a_picture(number) for number in range(1, 5)]
    with divided_engine(path, [], encoder=encoder_of(width)) as (model, engine):
        assert model.decoder.position_axes == 3
        alone = answers(engine, requests, together=True)
    with divided_engine(path, three[:1], encoder=encoder_of(width)) as (_, engine):
        divided = answers(engine, requests, together=True)
    assert [d.tokens for d in divided] == [d.tokens for d in alone]
    assert len({d.tokens for d in divided}) == len(requests)


def test_cross_attention_images_reach_all_ranks(tmp_path, three) -> None:
    path, tiny = tmp_path / "mllama.gguf", mllama(tmp_path)
    requests = list(itertools.islice(test_engine_vision.mixed_requests(tiny), 8))
    with test_engine_vision.running(tiny) as engine:
        alone = answers(engine, requests, together=True)
    encoder = LocalEncoder(tiny.tower(), device=CPU, weight_bytes=0)
    with divided_engine(path, three[:1], encoder=encoder) as (_, engine):
        divided = answers(engine, requests, together=True)
    assert [d.tokens for d in divided] == [d.tokens for d in alone]


def encoder_of(width: int) -> LocalEncoder:
    return LocalEncoder(PretendTower(rows=6, width=width), device=CPU, weight_bytes=0)


def about_a_picture(number: int) -> GenerationRequest:
    image = picture(number, rows=6)
    span = ImageSpan(7, 6, whole=False, digest=image.digest, grid=(2, 3))
    prompt, greedy = tuple(range(40, 60 + 15 * number)), SamplingParams(temperature=0)
    return GenerationRequest(str(number), prompt, StopRules(9), greedy, (span,), images=(image,))


def test_an_error_of_a_rank_is_reported_by_rank_0(tmp_path, three) -> None:
    write_llama(tmp_path / "tiny.gguf")
    write_tiny_llama(tmp_path / "other.gguf", config="gqa", seed=1)
    lead = RankZero(HOST, 2)
    three[0].sit(lead.rank_infos[0], tmp_path / "tiny.gguf", told=tmp_path / "other.gguf")
    with contextlib.closing(lead), pytest.raises(ModelFileError, match=r"Rank 1 .* different file"):
        assembled(lead, tmp_path / "tiny.gguf")
    lead = RankZero(HOST, 2)
    three[0].sit(lead.rank_infos[0], tmp_path / "missing.gguf")
    with contextlib.closing(lead), pytest.raises(ModelFileError, match=r"Rank 1 .*missing\.gguf"):
        assembled(lead, tmp_path / "tiny.gguf")
    small = divided_engine(tmp_path / "tiny.gguf", three[:1], memory_bytes=100_000)
    with pytest.raises(DoesNotFitError, match="bytes"), small:
        pass


@pytest.mark.unfinished("a rank dies during a request")
def test_a_rank_that_dies_ends_the_streams_with_an_error(tmp_path, three, monkeypatch) -> None:
    write_llama(tmp_path / "tiny.gguf")
    kill_at_token(3, three[0], monkeypatch)
    with divided_engine(tmp_path / "tiny.gguf", three[:1]) as (_, engine):
        delta = asyncio.run(whole_answer(engine))
        assert delta.finish is FinishReason.FAILED and "Rank 1 of 2 is gone" in str(delta.error)
        with pytest.raises(EngineDeadError, match="Rank 1 of 2 is gone"):
            engine.check()
        with pytest.raises(EngineDeadError):
            asyncio.run(first_delta(engine, "b"))


@pytest.mark.unfinished("a rank dies during a request")
def test_no_token_is_delivered_of_a_step_during_which_a_rank_dies(
    tmp_path, three, monkeypatch
) -> None:
    """NCCL's collectives are aborted then, so on GPUs the token would be that of undefined sums."""
    write_llama(tmp_path / "tiny.gguf")
    collect, steps = DeviceRunner.collect, itertools.count(1)
    with divided_engine(tmp_path / "tiny.gguf", three[:1]) as (_, engine):

        def losing(runner: DeviceRunner, launched: Any) -> tuple[Result, ...]:
            if next(steps) == 3:
                three[0].kill()
                with pytest.raises(EngineDeadError, match="Rank 1 of 2 is gone"):
                    check_for_a_while(engine)
            return collect(runner, launched)

        monkeypatch.setattr(DeviceRunner, "collect", losing)
        delta = asyncio.run(whole_answer(engine))
    assert delta.finish is FinishReason.FAILED and "Rank 1 of 2 is gone" in str(delta.error)
    assert len(delta.tokens) == 2


def test_a_rank_that_dies_without_requests_is_noticed(tmp_path, three) -> None:
    write_llama(tmp_path / "tiny.gguf")
    with divided_engine(tmp_path / "tiny.gguf", three[1:]) as (_, engine):
        engine.check()
        three[2].kill()
        with pytest.raises(EngineDeadError, match="Rank 2 of 3 is gone"):
            check_for_a_while(engine)


async def first_delta(engine: AsyncEngine, name: str) -> Delta:
    request = GenerationRequest(name, tuple(range(40, 60)), StopRules(200), SamplingParams(seed=1))
    async with contextlib.aclosing(engine.stream(request)) as deltas:
        return await anext(deltas)


def kill_at_token(number: int, follower: Follower, monkeypatch) -> None:
    """When the engine takes in that token, so the next step runs without the follower."""
    token_bytes, taken = Tokenizer.token_bytes, itertools.count(1)

    def killing(tokenizer: Tokenizer, token: int) -> bytes:
        if next(taken) == number:
            follower.kill()
        return token_bytes(tokenizer, token)

    monkeypatch.setattr(Tokenizer, "token_bytes", killing)


async def whole_answer(engine: AsyncEngine) -> Delta:
    request = GenerationRequest("a", tuple(range(40, 60)), StopRules(200), SamplingParams(seed=1))
    merged = Delta()
    async with asyncio.timeout(HANG_S), contextlib.aclosing(engine.stream(request)) as deltas:
        async for delta in deltas:
            merged = merged.merged(delta)
    return merged


def check_for_a_while(engine: AsyncEngine) -> None:
    """Repeat the check until it raises."""
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        engine.check()
        time.sleep(0.05)

"""Recorded decode steps give the same bits as computed ones."""

import logging
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model_zoo.chat_model import ChatModel
from model_zoo.registry import load
from runtime.engine import memory_plan
from runtime.engine.request import Delta, GenerationRequest, SamplingParams, StopRules
from runtime.kernels.recording import Recording
from runtime.worker import recorded_steps
from tests.families.factored_files import factored
from tests.families.text_families import DIVERSE, TEXT_MODELS
from tests.gguf_files import rewrite
from tests.kernels.native_kernels import require_native_kernels
from tests.parity.test_engine import answers, mixed_requests, running

CPU = torch.device("cpu")
# The last ones have axes of positions, gates of heads with bounds, and experts of groups, which the
# diverse ones lack.
OTHERS = "qwen3vl step35 grovemoe".split()
RECORDED = [*(family for family in DIVERSE if family != "mllama"), *OTHERS]
PLAIN = SamplingParams(temperature=0), SamplingParams(seed=4), SamplingParams(top_k=3, seed=5)


@pytest.fixture(autouse=True)
def native() -> None:
    require_native_kernels()


@pytest.fixture
def recordings(monkeypatch) -> list[Recording]:
    """What is recorded during a test."""
    made: list[Recording] = []
    record = recorded_steps.record

    def noted(*arguments) -> Recording:
        made.append(record(*arguments))
        return made[-1]

    monkeypatch.setattr(recorded_steps, "record", noted)
    return made


def model_of(family: str, folder: Path) -> ChatModel:
    path = folder / "model.gguf"
    TEXT_MODELS[family].write(path, "plain")
    return load(path, device=CPU, dtype=torch.float32)


def answered(model: ChatModel, *, recorded: bool, monkeypatch, **options) -> list[Delta]:
    """With log-probabilities, which show differences of one bit; at last without, so that draws are
    recorded too."""
    with monkeypatch.context() as patch:
        if not recorded:
            patch.setattr(memory_plan, "recorded_bytes", lambda *_, **__: 0)
        with running(model, **options) as engine:
            requests = [
                replace(request, stop=StopRules(request.stop.max_tokens // 2))
                for request in mixed_requests(model.tokenizer.vocab_size)[:6]
            ]
            first = answers(engine, requests, together=True)
            turns = [
                GenerationRequest(
                    f"again-{request.id}",
                    request.prompt + delta.tokens + (5, 6),
                    StopRules(6),
                    SamplingParams(temperature=0, logprobs=2),
                )
                for request, delta in zip(requests[:3], first, strict=False)
            ]
            second = answers(engine, turns, together=True)
            plain = [
                replace(turn, id=f"plain-{turn.id}", sampling=sampling)
                for turn, sampling in zip(turns, PLAIN, strict=True)
            ]
            return [*first, *second, *answers(engine, plain, together=True)]


def contents(deltas: list[Delta]) -> list[tuple]:
    return [(d.tokens, d.text, d.finish, d.logprobs) for d in deltas]


@pytest.mark.parametrize("family", RECORDED)
def test_recorded_answers_are_the_computed_ones(
    family: str, tmp_path, monkeypatch, recordings
) -> None:
    """Prompts share prefixes, join decoding sequences in a step, and are sampled in every way; few
    pages make for preemption."""
    model = model_of(family, tmp_path)
    options = {"max_sequences": 5, "cache_tokens": 256, "monkeypatch": monkeypatch}
    expected = answered(model, recorded=False, **options)
    assert not recordings
    assert contents(answered(model, recorded=True, **options)) == contents(expected)
    with_draws = ["caravan_draw" in recording.names for recording in recordings]
    assert 2 < with_draws.count(False) <= 5  # one for each number of sequences
    assert 1 < with_draws.count(True) <= 6  # the first one in the warm-up
    assert all("caravan_matmul" in recording.names for recording in recordings)


def test_models_with_images_in_the_cache_compute_their_steps(
    tmp_path, monkeypatch, recordings, caplog
) -> None:
    """They are known beforehand."""
    model = model_of("mllama", tmp_path)
    options = {"max_sequences": 5, "monkeypatch": monkeypatch}
    expected = answered(model, recorded=False, **options)
    caplog.set_level(logging.INFO, recorded_steps.__name__)
    assert contents(answered(model, recorded=True, **options)) == contents(expected)
    assert not recordings
    assert not [record for record in caplog.records if "not recorded" in record.message]


def test_suppressed_tokens_are_recorded_with_the_draws(tmp_path, monkeypatch, recordings) -> None:
    model_of("gemma4", tmp_path)
    keys = {"tokenizer.ggml.suppress_tokens": [5, 36]}
    path = rewrite(tmp_path / "model.gguf", tmp_path / "suppressed.gguf", keys=keys)
    model = load(path, device=CPU, dtype=torch.float32)
    expected = answered(model, recorded=False, max_sequences=3, monkeypatch=monkeypatch)
    found = answered(model, recorded=True, max_sequences=3, monkeypatch=monkeypatch)
    assert contents(found) == contents(expected)
    drawn = [each.names for each in recordings if "caravan_draw" in each.names]
    assert drawn and all("caravan_fill_listed" in names for names in drawn)


@pytest.mark.parametrize("family", ["qwen2", "gpt-oss", "llama4"])
def test_products_with_factors_are_recorded(family, tmp_path, monkeypatch, recordings) -> None:
    model_of(family, tmp_path)
    path = factored(tmp_path / "model.gguf", tmp_path / "factored.gguf")
    model = load(path, device=CPU, dtype=torch.float32)
    expected = answered(model, recorded=False, max_sequences=2, monkeypatch=monkeypatch)
    found = answered(model, recorded=True, max_sequences=2, monkeypatch=monkeypatch)
    assert contents(found) == contents(expected) and recordings


def test_a_growing_context_crosses_pages_and_windows(tmp_path, monkeypatch, recordings) -> None:
    model = model_of("gemma3", tmp_path)
    ask = GenerationRequest(
        "a",
        tuple(random.Random(1).choices(range(300), k=30)),
        StopRules(200),
        SamplingParams(temperature=0, logprobs=0),
    )

    def tokens(*, recorded: bool) -> list[tuple]:
        with monkeypatch.context() as patch:
            if not recorded:
                patch.setattr(memory_plan, "recorded_bytes", lambda *_, **__: 0)
            with running(model, max_sequences=2) as engine:
                return contents(answers(engine, [ask], together=False))

    assert tokens(recorded=True) == tokens(recorded=False)
    assert len(recordings) == 2  # of one row: with its draw, at the warm-up, and without

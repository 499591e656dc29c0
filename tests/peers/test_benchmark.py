"""The parts of `make bench` that import llama.cpp, with fakes in place of what is measured."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench import measure, real, run
from bench.contender import Decoding, Prompts, Setting
from bench.machine import describe_peer
from bench.measure import Plan, against_rest
from bench.peer import system_info
from bench.run import ALL_TYPES
from bench.sections import DRAFTS, MODELS
from tests.checkout import DEMO_MODEL

PLAN = Plan(2, Setting(1, 64, 1, 64), Prompts(1000))


def test_llama_cpp_is_compiled_for_this_processor() -> None:
    assert describe_peer(system_info()).startswith("- llama.cpp: ")


def test_no_ray_runs_beside_the_bare_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Fake:
        def __init__(self, *arguments: object) -> None:
            self._name = "bare" if measure.Caravan in arguments else "rest"
            events.append(f"{self._name} starts")

        def prefill(self, prompt: Sequence[int]) -> float:
            return len(prompt) / 1000

        def decode(self, prompts: Sequence[Sequence[int]], tokens: int) -> Decoding:
            return Decoding(len(prompts) * tokens, 2.0)

        def close(self) -> None:
            events.append(f"{self._name} ends")

    monkeypatch.setattr(measure, "Served", Fake)
    monkeypatch.setattr(measure, "isolated", Fake)
    rows = against_rest(Path("x.gguf"), "Q4_0", PLAN)
    assert events == [
        *("rest starts", "rest ends", "bare starts", "bare ends"),
        *("bare starts", "bare ends", "rest starts", "rest ends"),
    ]
    assert [(row.task, row.unit, row.first) for row in rows] == [
        ("first token, 32-token prompt", "ms", (32.0, 32.0)),
        ("prefill, 512 tokens", "tokens/s", (1000.0, 1000.0)),
        ("decode, 1 sequence", "tokens/s", (24.0, 24.0)),
        ("decode, 4 sequences", "tokens/s", (64.0, 64.0)),
        ("decode, 16 sequences", "tokens/s", (192.0, 192.0)),
    ]


@pytest.mark.parametrize(
    ("options", "written"),
    [
        ([], [MODELS, DRAFTS]),
        (["--types", "Q4_0"], [DRAFTS]),
        (["--types", *ALL_TYPES], [MODELS, DRAFTS]),
        (["--quick"], []),
    ],
)
def test_a_part_of_the_models_does_not_replace_all_of_them(
    monkeypatch: pytest.MonkeyPatch, options: list[str], written: list[str]
) -> None:
    sections = {"models": (MODELS, lambda _: "m"), "drafts": (DRAFTS, lambda _: "d")}
    found = published(monkeypatch, run)
    monkeypatch.setattr(run, "SECTIONS", sections)
    monkeypatch.setattr(sys, "argv", ["bench", *options])
    run.main()
    assert found == written


@pytest.mark.parametrize(("options", "writes"), [([], True), (["--settings", "fine"], False)])
def test_a_part_of_the_settings_does_not_replace_all_of_them(
    monkeypatch: pytest.MonkeyPatch, options: list[str], writes: bool
) -> None:
    found = published(monkeypatch, real)
    monkeypatch.setattr(real, "speed_rows", lambda *_: [])
    monkeypatch.setattr(real, "first_token_rows", lambda *_: [])
    monkeypatch.setattr(real, "_accuracies", lambda *_: {})
    monkeypatch.setattr(real, "_section", lambda *_: "")
    monkeypatch.setattr(sys, "argv", ["real", "--source", str(DEMO_MODEL), *options])
    real.main()
    assert bool(found) == writes


def published(monkeypatch: pytest.MonkeyPatch, module: object) -> list[str]:
    """The headings of the sections that the module writes from now on."""
    headings: list[str] = []

    def publish(heading: str, section: str, *, write: bool) -> None:
        if write:
            headings.append(heading)

    monkeypatch.setattr(module, "publish", publish)
    return headings

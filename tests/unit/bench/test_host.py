"""The host's time of a step."""

import pytest

from bench.host import KINDS, StubModel, StubRecording, host_section, step_ms
from bench.sections import HOST


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.host.SEQUENCES", (1, 3))
    monkeypatch.setattr("bench.host.ANSWER_TOKENS", 8)


def test_every_kind_of_cache_has_steps_that_take_time() -> None:
    section = host_section(rounds=1)
    assert section.startswith(f"{HOST}\n")
    rows = [line.split("|")[1].strip() for line in section.splitlines() if line.count("|") == 4]
    assert rows[2:] == [f"{kind}; {way} graphs" for kind in KINDS for way in ("with", "without")]


@pytest.mark.parametrize("graphs", [True, False])
def test_decode_steps_are_repeated_with_graphs_only(
    graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed, replayed = list[int](), list[int]()
    states, replay = StubModel.states, StubRecording.replay
    monkeypatch.setattr(
        StubModel,
        "states",
        lambda self, batch, cache: computed.append(len(batch.tokens)) or states(self, batch, cache),
    )
    monkeypatch.setattr(
        StubRecording,
        "replay",
        lambda self: replayed.append(len(self.result.states)) or replay(self),
    )
    assert step_ms(KINDS["full"], 3, graphs=graphs) > 0
    if graphs:
        assert computed.count(3) == 1 and replayed.count(3) > 3
    else:
        assert computed.count(3) > 3 and not replayed

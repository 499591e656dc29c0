"""The host's time of a step."""

from bench.host import KINDS, host_section, step_ms
from bench.sections import HOST


def test_every_kind_of_cache_has_steps_that_take_time(monkeypatch) -> None:
    monkeypatch.setattr("bench.host.SEQUENCES", (1, 3))
    monkeypatch.setattr("bench.host.ANSWER_TOKENS", 8)
    assert step_ms(KINDS["full"], 3) > 0
    section = host_section(rounds=1)
    assert section.startswith(f"{HOST}\n")
    rows = [line.split("|")[1].strip() for line in section.splitlines() if line.count("|") == 4]
    assert rows[2:] == [*KINDS]

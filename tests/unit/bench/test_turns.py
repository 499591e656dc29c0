"""Second turns in the benchmark: both engines compute only what is new."""

from contextlib import closing
from pathlib import Path

from bench.contender import Setting
from bench.ours import Caravan
from bench.turns import Turns, configurations, ensure_model, turn_row

TURNS = Turns(prompt=100, answer=40, more=5)


def test_a_second_turn_of_a_recurrent_model_is_restored_from_a_checkpoint(tmp_path: Path) -> None:
    config = configurations(layers=4, hidden=64)["recurrent"]
    path = ensure_model(tmp_path / "recurrent.gguf", config)
    with closing(Caravan(path, Setting(1, 256, sequences=2, step_tokens=64))) as engine:
        row = turn_row("recurrent", engine, TURNS, rounds=2)
    statistics = engine._engine.statistics()  # of the closed engine: the last step has retired
    assert len(row.first) == len(row.second) == 2 and min(row.first + row.second) > 0
    # The request for the answer finds the prompt, and the second turn the first one.
    assert statistics.cached_tokens_total == 3 * (80 + 128)

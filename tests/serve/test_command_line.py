"""`caravan serve configs/quickstart.yaml`, from the first token to a clean end."""

from typing import Any


def test_the_quickstart_answers_and_an_interrupt_ends_all_processes(
    quickstart: dict[str, Any],
) -> None:
    assert "Caravan" in quickstart["answer"]
    assert '"event": "model"' in quickstart["logged"]

"""Replicas of small models, loaded as at a start."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serve_app.config.settings import ModelSettings
from serve_app.replica.loading import load_replica
from serve_app.replica.replica import ModelReplica
from tests.checkout import DEMO_MODEL


def settings(
    source: Path | str = DEMO_MODEL, projector: Path | None = None, **change: Any
) -> ModelSettings:
    """Two sequences of 64 tokens on one thread, unless `change` says otherwise."""
    given = {"name": "demo", "source": str(source), "device": "cpu", "threads": 1}
    given |= {"context_tokens": 64, "max_sequences": 2}
    given |= {} if projector is None else {"projector": str(projector)}
    return ModelSettings(**{**given, **change})


@contextmanager
def loaded(*files: Path, **change: Any) -> Iterator[ModelReplica]:
    """A replica with these `settings`."""
    replica = load_replica(settings(*files, **change))
    try:
        yield replica
    finally:
        replica.close()

"""Ranks that are processes: followers that wait for seats, and an engine whose team they join.

`python -m tests.rank_processes` is such a follower. It reads jobs from its standard input, one
after the other, so that few processes serve many tests.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from model_zoo.chat_model import ChatModel
from model_zoo.rank_part import files_digest, load_part
from model_zoo.registry import LoadOptions, load
from runtime.distributed.control_channel import RankInfo, RankZero
from runtime.distributed.rank_group import Member, RankGroup
from runtime.distributed.ranks import ALONE
from runtime.engine.assembly import EngineOptions, assemble, compute_part
from runtime.engine.async_engine import AsyncEngine
from runtime.vision.encoder import ImageEncoder
from tests.checkout import ROOT

CPU = torch.device("cpu")
HOST = "127.0.0.1"


class Follower:
    """A process that computes parts; when it has been killed, the next job starts another."""

    def __init__(self) -> None:
        self.process = self._started()

    def _started(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.rank_processes"],
            stdin=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            text=True,
        )

    def sit(self, rank_info: RankInfo, path: Path, **change: Any) -> None:
        """Join there with a part of the file; `change`: other things than usual that it does."""
        if self.process.poll() is not None:
            self.process = self._started()
        assert self.process.stdin is not None
        job = {"seat": asdict(rank_info), "path": str(path), **change}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def followers(count: int) -> Iterator[list[Follower]]:
    processes = [Follower() for _ in range(count)]
    try:
        yield processes
    finally:
        for follower in processes:
            follower.kill()


@contextmanager
def divided_engine(
    path: Path, members: Sequence[Follower], **options: Any
) -> Iterator[tuple[ChatModel, AsyncEngine]]:
    """An engine over this process and `members`, started."""
    lead = RankZero(HOST, len(members) + 1) if members else None
    for rank_info, member in zip(lead.rank_infos if lead else (), members, strict=True):
        member.sit(rank_info, path)
    model, engine = assembled(lead, path, **options)
    engine.start()
    try:
        yield model, engine
    finally:
        engine.close()


def assembled(
    lead: RankZero | None, path: Path, *, encoder: ImageEncoder | None = None, **options: Any
) -> tuple[ChatModel, AsyncEngine]:
    """The engine over all that join the `lead`, or over this process alone."""
    rank_group = None if lead is None else RankGroup(lead, CPU)
    with ExitStack() as failing:
        failing.callback(lambda: rank_group and rank_group.close())
        ranks = ALONE if rank_group is None else rank_group.ranks
        model = load(path, device=CPU, dtype=torch.float32, options=LoadOptions(ranks=ranks))
        if rank_group is not None:
            rank_group.wait_loaded(files_digest(path))
        settings = {"context_tokens": 256, "max_sequences": 8, "step_tokens": 32, **options}
        engine, _ = assemble(
            model.decoder,
            model.tokenizer.token_bytes,
            device=CPU,
            options=EngineOptions(**settings),
            encoder=encoder,
            rank_group=rank_group,
        )
        failing.pop_all()
        return model, engine


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        job = json.loads(line)
        compute(RankInfo(**job["seat"]), Path(job["path"]), Path(job.get("told", job["path"])))


def compute(rank_info: RankInfo, path: Path, told: Path) -> None:
    """`told`: the file that it says it has."""
    member = Member(rank_info, CPU)
    try:
        part = load_part(
            path, device=CPU, dtype=torch.float32, context_tokens=None, ranks=member.ranks
        )
        member.report_loaded(files_digest(told))
        compute_part(part, member, device=CPU)
    except Exception as error:
        member.control_channel.fail(error)
    finally:
        member.close()


if __name__ == "__main__":
    main()

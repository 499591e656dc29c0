"""Ranks that are processes: followers that wait for seats, and an engine whose team they join.

A follower receives jobs, one after the other, so that few processes serve many tests. All are
forked from one process that has imported this module and computed nothing.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from model_zoo.chat_model import ChatModel
from model_zoo.rank_part import files_digest, load_part
from model_zoo.registry import LoadOptions, load
from runtime.distributed.control_channel import RankInfo, RankZero
from runtime.distributed.rank_group import Member, RankGroup
from runtime.distributed.ranks import ALONE
from runtime.engine.assembly import assemble, compute_part
from runtime.engine.async_engine import AsyncEngine
from runtime.engine.engine_options import EngineOptions
from runtime.vision.encoder import ImageEncoder

CPU = torch.device("cpu")
HOST = "127.0.0.1"
FORKED = get_context("forkserver")
FORKED.set_forkserver_preload([__name__])


class Follower:
    """A process that computes parts; when it has been killed, the next job starts another."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._jobs, jobs = FORKED.Pipe()
        self._process = FORKED.Process(target=follow, args=(jobs,), daemon=True)
        self._process.start()
        jobs.close()

    def sit(self, rank_info: RankInfo, path: Path, *, told: Path | None = None) -> None:
        """Join there with a part of the file; `told`: the file that it says it has."""
        if not self._process.is_alive():
            self._start()
        self._jobs.send((rank_info, path, told or path))

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


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


def follow(jobs: Connection) -> None:
    """Compute parts until the other end is closed."""
    torch.set_num_threads(1)
    while True:
        try:
            job = jobs.recv()
        except EOFError:
            return
        compute(*job)


def compute(rank_info: RankInfo, path: Path, told: Path) -> None:
    """`told`: the file that it says it has."""
    member = Member(rank_info, CPU)
    try:
        options = LoadOptions(ranks=member.ranks)
        part = load_part(path, device=CPU, dtype=torch.float32, options=options)
        member.report_loaded(files_digest(told))
        compute_part(part, member, device=CPU)
    except Exception as error:
        member.control_channel.fail(error)
    finally:
        member.close()

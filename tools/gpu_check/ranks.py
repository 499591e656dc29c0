"""A model divided over two devices, whose ranks are joined by NCCL, against one device.

`python -m tools.gpu_check.ranks` is the other rank, started by the section.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch

from bench.make_model import write_model
from model_zoo.rank_part import files_digest, load_part
from model_zoo.registry import LoadOptions
from runtime.distributed.control_channel import RankInfo, RankZero
from runtime.distributed.rank_group import Member, RankGroup
from runtime.distributed.ranks import ALONE, Ranks
from runtime.engine.assembly import compute_part
from runtime.engine.async_engine import AsyncEngine
from runtime.quant.weight import Compute
from runtime.worker.model import DecoderModel
from serve_app.child_process import end_with_parent
from tests.cuda.large_model import SHAPE
from tools.gpu_check import speed
from tools.gpu_check.report import Goal, Task

_HOST = "127.0.0.1"
_NAME = "8B on two devices by NCCL, tokens/s by those of one"
_GOAL: Goal = ("at least", 1.7)


def run(task: Task) -> None:
    devices = 2 if task.dry else torch.cuda.device_count()
    if devices < 2:
        task.report.skip(_NAME, "this machine has one device", _GOAL)
        return
    path, streams = task.folder / "8B.gguf", speed.load_of(task).streams
    shape = speed.TINY if task.dry else replace(SHAPE, layers=32)
    write_model(path, speed.LABEL, speed.vocabulary(task), shape)
    alone = _part(path, task.device, ALONE)
    with speed.decoding_engine(task, alone, graphs=True) as engine:
        before = [_step_s(task, "one device", engine, count) for count in streams]
    del alone
    with _divided(task, path) as engine:
        after = [_step_s(task, "two devices", engine, count) for count in streams]
    for count, one, two in zip(streams, before, after, strict=True):
        goal = _GOAL if count == streams[-1] else None
        task.report.figure(f"{_NAME}, {count} streams", one / two, "", goal)


def _step_s(task: Task, name: str, engine: AsyncEngine, streams: int) -> float:
    return speed.median_s(speed.decode(task, f"{name}, {streams} streams", engine, streams))


@contextmanager
def _divided(task: Task, path: Path) -> Iterator[AsyncEngine]:
    """An engine over this process and another one."""
    rank_zero = RankZero(_HOST, 2)
    job = {"path": str(path), "cuda": not task.dry, "seat": asdict(rank_zero.rank_infos[0])}
    command = [sys.executable, "-m", __name__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdin is not None
            print(json.dumps(job), file=other.stdin, flush=True)
            group = RankGroup(rank_zero, task.device)
            decoder = _part(path, task.device, group.ranks)
            group.wait_loaded(files_digest(path))
            with speed.decoding_engine(task, decoder, rank_group=group) as engine:
                yield engine
        finally:
            other.kill()


def _part(path: Path, device: torch.device, ranks: Ranks) -> DecoderModel:
    options = LoadOptions(ranks=ranks, compute=Compute.FINE)
    return load_part(path, device=device, dtype=torch.bfloat16, options=options)


def main() -> None:
    end_with_parent()
    job = json.loads(sys.stdin.readline())
    rank_info, path = RankInfo(**job["seat"]), Path(job["path"])
    device = torch.device("cuda", rank_info.rank) if job["cuda"] else torch.device("cpu")
    if job["cuda"]:
        torch.cuda.set_device(device)
    member = Member(rank_info, device)
    try:
        decoder = _part(path, device, member.ranks)
        member.report_loaded(files_digest(path))
        compute_part(decoder, member, device=device)
    except Exception as error:
        member.control_channel.fail(error)
    finally:
        member.close()


if __name__ == "__main__":
    main()

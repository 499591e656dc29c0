"""Which process gets a request for a model on demand: one that has it, or that has most room."""

import hashlib
from collections.abc import Sequence

from serve_app.gateway.listing import ListedModel
from serve_app.on_demand.report import PoolReport, Resident


def place(
    reports: Sequence[PoolReport], model: ListedModel, *, avoid: frozenset[str] = frozenset()
) -> PoolReport:
    """Among processes that can load it, of which there is one at least.

    One of `avoid` only where there is no other. One that is full of requests for the model is left
    for another that has room without unloading anything.
    """
    usable = [report for report in reports if report.replica not in avoid] or list(reports)
    holders = [report for report in usable if _held(report, model) is not None]
    others = [report for report in usable if report not in holders]
    if not holders:
        return max(others, key=lambda report: _welcome(report, model))
    holder = min(holders, key=lambda report: _load(report, model))
    resident = _held(holder, model)
    assert resident is not None
    roomy = [report for report in others if _has_room(report, resident.loaded.reserved_bytes)]
    if resident.waiting and roomy:
        return max(roomy, key=lambda report: _welcome(report, model))
    return holder


def _held(report: PoolReport, model: ListedModel) -> Resident | None:
    resident = report.resident(model.name)
    return resident if resident and resident.loaded.model.digest == model.digest else None


def _load(report: PoolReport, model: ListedModel) -> tuple[int, int]:
    resident = _held(report, model)
    assert resident is not None
    return resident.waiting, resident.users


def _has_room(report: PoolReport, nbytes: int) -> bool:
    counted = report.most_models is None or len(report.residents) < report.most_models
    return counted and report.free_bytes >= nbytes


def _welcome(report: PoolReport, model: ListedModel) -> tuple[bool, int, int, bytes]:
    """Best where nothing has to go, then where most can; of equals always the same one.

    By rendezvous hashing (Thaler and Ravishankar, 1998).
    """
    idle = sum(each.loaded.reserved_bytes for each in report.residents if not each.users)
    key = f"{model.name} {report.replica}".encode()
    weight = hashlib.blake2b(key, digest_size=8).digest()
    # A model takes more than its file has, by its cache; the rest is for the process to find out.
    room = report.free_bytes if _has_room(report, model.file_bytes) else 0
    return room > 0, room, report.free_bytes + idle, weight

"""The process for a request to a model on demand: one that has loaded it, or the emptiest."""

import hashlib
from collections.abc import Sequence

from serve_app.messages.listing import ListedModel
from serve_app.on_demand.report import PoolReport, Resident


def choose_process(
    reports: Sequence[PoolReport],
    model: ListedModel,
    *,
    avoid: frozenset[str],
    unable: frozenset[str],
) -> PoolReport:
    """Chooses among processes that can load the model (at least one).

    A process of `avoid` is chosen only if there is no other, one of `unable` only after those. If
    requests wait for a slot where the model is loaded, another process that can load it without
    unloading anything is preferred.
    """
    able = [report for report in reports if report.replica not in unable]
    usable = [report for report in able if report.replica not in avoid] or able or list(reports)
    holders = [report for report in usable if _resident(report, model) is not None]
    others = [report for report in usable if report not in holders]
    if not holders:
        return max(others, key=lambda report: _preference(report, model))
    holder = min(holders, key=lambda report: _queue(report, model))
    resident = _resident(holder, model)
    assert resident is not None
    roomy = [report for report in others if _has_room(report, resident.loaded.reserved_bytes)]
    if resident.waiting and roomy:
        return max(roomy, key=lambda report: _preference(report, model))
    return holder


def _resident(report: PoolReport, model: ListedModel) -> Resident | None:
    resident = report.resident(model.name)
    return resident if resident and resident.loaded.model.digest == model.digest else None


def _queue(report: PoolReport, model: ListedModel) -> tuple[int, int]:
    resident = _resident(report, model)
    assert resident is not None
    return resident.waiting, resident.users


def _has_room(report: PoolReport, nbytes: int) -> bool:
    below_limit = report.most_models is None or len(report.residents) < report.most_models
    return below_limit and report.free_bytes >= nbytes


def _preference(report: PoolReport, model: ListedModel) -> tuple[int, int, bytes]:
    """Prefers free memory, then memory of idle models; ties are broken by rendezvous hashing
    (Thaler and Ravishankar, 1998), so that a model returns to the same process."""
    idle = sum(each.loaded.reserved_bytes for each in report.residents if not each.users)
    key = f"{model.name} {report.replica}".encode()
    weight = hashlib.blake2b(key, digest_size=8).digest()
    # A lower bound: the cache is not counted. The process itself plans the exact size.
    room = report.free_bytes if _has_room(report, model.file_bytes) else 0
    return room, report.free_bytes + idle, weight

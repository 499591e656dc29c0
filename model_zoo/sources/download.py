"""Fetching a blob: ranges of it in parallel, gone on with where an earlier try ended."""

import re
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock

import httpx

from model_zoo.sources.http import ATTEMPTS, Credentials, Http, Passing, Refused
from model_zoo.sources.partial import Part, PartialBlob
from model_zoo.store.manifest import Layer, Manifest
from model_zoo.store.model_name import ModelName
from runtime.errors import SourceError

TELLING_S = 0.2
ENDING_S = 0.05
# Failures are forgotten after this much has come; a server that gives a byte and breaks is not
# asked as often as a blob has bytes.
PROGRESS_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Location:
    """Where a blob is had, and what to show there."""

    url: httpx.URL
    credentials: Credentials


@dataclass(frozen=True, slots=True)
class Offer:
    """What a source has: a model's manifest, and where each of its blobs is."""

    name: ModelName
    manifest: Manifest
    locate: Callable[[Layer], Location]


@dataclass(frozen=True, slots=True)
class Streams:
    """How a blob is fetched: so many ranges at once, each of such a length."""

    count: int = 8
    part_bytes: int = 64 << 20


def download(
    http: Http,
    location: Location,
    path: Path,
    *,
    size: int,
    streams: Streams,
    told: Callable[[int], None],
) -> None:
    """Bring the file at `path` to its whole size; `told(bytes)` hears how much is here.

    Whoever calls holds the blob's lock. SourceError when it cannot be had, StoreError when it
    cannot be written; what has come is kept for the next call.
    """
    with PartialBlob(path, size=size, part_bytes=streams.part_bytes) as partial:
        fetch = _Fetch(http, location, partial, size)
        for count in (streams.count, *(ATTEMPTS - 1) * (1,)):
            try:
                fetch.run(count, told)
                break
            except _NoRanges:
                partial.begin_anew(size)
        else:
            raise SourceError(
                f"{location.url.host}: the connection breaks again and again, and the server "
                "cannot go on where it broke. Try again later."
            )
        told(partial.completed)


class _NoRanges(Exception):
    """The server sends all of it, whatever range it is asked for."""


class _Fetch:
    def __init__(self, http: Http, location: Location, partial: PartialBlob, size: int) -> None:
        self._http = http
        self._location = location
        self._partial = partial
        self._size = size
        self._fetching = 0
        self._lock = Lock()

    def run(self, streams: int, told: Callable[[int], None]) -> None:
        ended = Event()
        lacking = [part for part in self._partial.parts if part.missing]
        pool = ThreadPoolExecutor(max_workers=streams, thread_name_prefix="fetch")
        try:
            self._watch([pool.submit(self._part, part, ended) for part in lacking], told)
        finally:
            with self._lock:
                ended.set()
            pool.shutdown(wait=False, cancel_futures=True)
            self._end()

    def _end(self) -> None:
        """Returns when no thread writes any more; threads that wait for a server are woken.

        Threads are counted by themselves: an interrupt can hide one from the executor.
        """
        while self._fetching:
            self._http.hang_up()
            time.sleep(ENDING_S)

    def _watch(self, futures: list[Future[None]], told: Callable[[int], None]) -> None:
        pending = set(futures)
        while pending:
            done, pending = wait(pending, timeout=TELLING_S, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            told(self._partial.completed)

    def _part(self, part: Part, ended: Event) -> None:
        with self._lock:
            if ended.is_set():
                return
            self._fetching += 1
        try:
            self._retry(part, ended)
        finally:
            with self._lock:
                self._fetching -= 1

    def _retry(self, part: Part, ended: Event) -> None:
        patience = self._http.patience(self._location.url.host, sleep=ended.wait)
        while part.missing and not ended.is_set():
            before = part.done
            try:
                self._once(part, ended)
            except Passing as failure:
                if part.done - before >= PROGRESS_BYTES:
                    patience.renew()
                patience.wait(failure)
            except Refused as refusal:
                raise SourceError(
                    f"{self._location.url.host} does not give the blob, with status "
                    f"{refusal.status}."
                ) from None

    def _once(self, part: Part, ended: Event) -> None:
        begin = part.begin + part.done
        whole = (begin, part.end) == (0, self._size)
        headers = {} if whole else {"range": f"bytes={begin}-{part.end - 1}"}
        with self._http.stream(
            self._location.url, headers=headers, credentials=self._location.credentials
        ) as response:
            if not whole:
                self._check_range(response, begin, part.end)
            for chunk in response.iter_raw():
                if ended.is_set():
                    return
                if len(chunk) > part.missing:
                    raise SourceError(f"{response.url.host} sends more than the blob has.")
                self._partial.write(part, chunk)
        if part.missing:
            raise Passing(f"the answer ended {part.missing:,} bytes early")

    def _check_range(self, response: httpx.Response, begin: int, end: int) -> None:
        if response.status_code == 200:
            raise _NoRanges
        stated = re.fullmatch(
            r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)",
            response.headers.get("content-range", "").strip(),
        )
        # A server may send less of a range than it was asked for, but nothing else.
        if (
            stated is None
            or int(stated[1]) != begin
            or not begin <= int(stated[2]) < end
            or stated[3] not in ("*", str(self._size))
        ):
            raise SourceError(
                f"{response.url.host} sends another range than bytes {begin:,} to {end:,} of "
                f"{self._size:,}."
            )

"""Downloads a blob: ranges of it in parallel, resumed where an earlier attempt ended.

`huggingface_hub` is not used: its downloads follow redirects without our checks, cannot be stopped
at once and work for the Hub only, while registries need the same ranges and resumption.
"""

import re
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock

import httpx

from model_zoo.sources.http import MAX_ATTEMPTS, Credentials, Http, StatusError, TransientError
from model_zoo.sources.partial import BlobPart, PartialBlob
from model_zoo.store.manifest import Manifest, ManifestLayer
from model_zoo.store.model_name import ModelName
from runtime.errors import SourceError

REPORT_EVERY_S = 0.2
STOP_POLL_S = 0.05
# An attempt that received this many bytes resets the count of failures. A smaller number would let
# a server that breaks after each byte cause as many requests as a blob has bytes.
PROGRESS_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class BlobLocation:
    """Where a blob is published."""

    url: httpx.URL
    credentials: Credentials


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A published model: its manifest, and where each of its blobs is."""

    name: ModelName
    manifest: Manifest
    locate: Callable[[ManifestLayer], BlobLocation]


@dataclass(frozen=True, slots=True)
class DownloadStreams:
    """`count` ranges of `part_bytes` bytes each are downloaded at once."""

    count: int = 8
    part_bytes: int = 64 << 20


def download(
    http: Http,
    location: BlobLocation,
    path: Path,
    *,
    size: int,
    streams: DownloadStreams,
    report: Callable[[int], None],
) -> None:
    """Completes the file at `path`; `report` gets the number of bytes that are present.

    The caller holds the blob's lock. SourceError if the blob is not available, StoreError if the
    file cannot be written; received bytes are kept for the next call.
    """
    with PartialBlob(path, size=size, part_bytes=streams.part_bytes) as partial:
        fetch = _Fetch(http, location, partial, size)
        for count in (streams.count, *(MAX_ATTEMPTS - 1) * (1,)):
            try:
                fetch.run(count, report)
                break
            except _NoRanges:
                partial.restart(size)
        else:
            raise SourceError(
                f"{location.url.host}: the connection breaks repeatedly, and the server does not "
                "support ranges. Try again later."
            )
        report(partial.completed)


class _NoRanges(Exception):
    """The server ignores ranges and sends the whole blob."""


class _Fetch:
    def __init__(self, http: Http, location: BlobLocation, partial: PartialBlob, size: int) -> None:
        self._http = http
        self._location = location
        self._partial = partial
        self._size = size
        self._running = 0
        self._lock = Lock()

    def run(self, streams: int, report: Callable[[int], None]) -> None:
        stopped = Event()
        missing = [part for part in self._partial.parts if part.missing]
        pool = ThreadPoolExecutor(max_workers=streams, thread_name_prefix="fetch")
        try:
            self._wait([pool.submit(self._part, part, stopped) for part in missing], report)
        finally:
            with self._lock:
                stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            self._stop_threads()

    def _stop_threads(self) -> None:
        """Returns when no thread writes any more; wakes threads that wait for a server.

        Threads are counted here: an interrupt can hide one from the executor.
        """
        while self._running:
            self._http.hang_up()
            time.sleep(STOP_POLL_S)

    def _wait(self, futures: list[Future[None]], report: Callable[[int], None]) -> None:
        pending = set(futures)
        while pending:
            done, pending = wait(pending, timeout=REPORT_EVERY_S, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            report(self._partial.completed)

    def _part(self, part: BlobPart, stopped: Event) -> None:
        with self._lock:
            if stopped.is_set():
                return
            self._running += 1
        try:
            retrying = self._http.retrying(self._location.url.host, sleep=stopped.wait)
            while part.missing and not stopped.is_set():
                retrying(self._attempt, part, stopped)
        except StatusError as refusal:
            raise SourceError(
                f"{self._location.url.host} refuses the blob with status {refusal.status}."
            ) from None
        finally:
            with self._lock:
                self._running -= 1

    def _attempt(self, part: BlobPart, stopped: Event) -> None:
        """Raises TransientError, unless the attempt made progress before it failed."""
        before = part.done
        try:
            if not stopped.is_set():
                self._request(part, stopped)
        except TransientError:
            if part.done - before < PROGRESS_BYTES:
                raise

    def _request(self, part: BlobPart, stopped: Event) -> None:
        begin = part.begin + part.done
        whole = (begin, part.end) == (0, self._size)
        headers = {} if whole else {"range": f"bytes={begin}-{part.end - 1}"}
        with self._http.stream(
            self._location.url, headers=headers, credentials=self._location.credentials
        ) as response:
            if not whole:
                self._check_range(response, begin, part.end)
            for chunk in response.iter_raw():
                if stopped.is_set():
                    return
                if len(chunk) > part.missing:
                    raise SourceError(f"{response.url.host} sends more bytes than the blob has.")
                self._partial.write(part, chunk)
        if part.missing:
            raise TransientError(f"the response ended {part.missing:,} bytes early")

    def _check_range(self, response: httpx.Response, begin: int, end: int) -> None:
        if response.status_code == 200:
            raise _NoRanges
        stated = re.fullmatch(
            r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)",
            response.headers.get("content-range", "").strip(),
        )
        # A server may send less than the requested range, but nothing else.
        if (
            stated is None
            or int(stated[1]) != begin
            or not begin <= int(stated[2]) < end
            or stated[3] not in ("*", str(self._size))
        ):
            raise SourceError(
                f"{response.url.host} sends another range than the requested bytes {begin:,} to "
                f"{end:,} of {self._size:,}."
            )

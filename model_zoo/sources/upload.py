"""Uploads a blob to a registry in chunks, resumed where a broken connection ended.

The protocol is that of the OCI distribution specification, "Pushing a blob in chunks".
"""

import re
from collections.abc import Callable, Iterator
from typing import BinaryIO

import httpx

from model_zoo.sources.http import Http, Response, StatusError, TransientError, same_origin
from model_zoo.sources.oci_registry import Repository
from model_zoo.store.manifest import ManifestLayer
from runtime.errors import SourceError, StoreError

PIECE_BYTES = 1 << 20
# An attempt that sent this many bytes resets the count of failures, as in downloads.
PROGRESS_BYTES = 1 << 20
_RANGE = re.compile(r"(?:bytes=)?0-(\d{1,18})")
# Statuses of a registry that has another offset, or has forgotten the session.
_LOST = (404, 416)


def upload(
    layer: ManifestLayer,
    content: BinaryIO,
    repository: Repository,
    http: Http,
    *,
    report: Callable[[int], None],
    chunk_bytes: int,
) -> None:
    """Uploads the blob; `report` gets the number of bytes sent so far, and ends the upload if it
    raises. SourceError if the registry refuses the blob or repeatedly breaks without progress."""
    _Upload(layer, content, repository, http, report, chunk_bytes).run()


def is_present(digest: str, repository: Repository, http: Http) -> bool:
    """Whether the registry has the blob. Raises TransientError and SourceError like
    `Http.stream`."""
    url = repository.blob(digest)
    try:
        with http.stream(url, method="HEAD", credentials=repository.token):
            return True
    except StatusError as refusal:
        if refusal.status == 404:
            return False
        raise refused(url, "a request for a blob", refusal) from None


def refused(url: httpx.URL, what: str, refusal: StatusError) -> SourceError:
    reason = f"refuses {what} with status {refusal.status}"
    if refusal.status in (401, 403):
        reason += "; it may require a login, and registries are used without one"
    return SourceError(f"{url.host} {reason}.")


class _Upload:
    """`_session`: the address of the next request, None before the first one. `_sent`: the number
    of bytes that the registry has. `_broken`: a request failed, so the registry must be asked for
    both."""

    def __init__(
        self,
        layer: ManifestLayer,
        content: BinaryIO,
        repository: Repository,
        http: Http,
        report: Callable[[int], None],
        chunk_bytes: int,
    ) -> None:
        self._layer, self._content = layer, content
        self._repository, self._http = repository, http
        self._report, self._chunk_bytes = report, chunk_bytes
        self._session: httpx.URL | None = None
        self._sent = 0
        self._broken = self._complete = False

    def run(self) -> None:
        url = self._repository.uploads
        retrying = self._http.retrying(url.host)
        try:
            while not self._complete:
                retrying(self._attempt)
        except StatusError as refusal:
            raise refused(url, "the blob", refusal) from None

    def _attempt(self) -> None:
        """Raises TransientError, unless the attempt made progress before it failed."""
        before = self._sent
        try:
            self._report(self._sent)
            if self._broken:
                self._resume()
            self._broken = True
            if not self._complete:
                self._continue()
            self._broken = False
        except TransientError:
            if self._sent - before < PROGRESS_BYTES:
                raise

    def _continue(self) -> None:
        """Sends the next request of the session."""
        if self._session is None:
            self._begin()
            return
        try:
            if self._sent < self._layer.size:
                self._send_chunk(self._session)
            else:
                self._finish(self._session)
        except StatusError as refusal:
            if refusal.status not in _LOST:
                raise
            if self._sent == 0:
                self._session = None
            raise TransientError(f"status {refusal.status}") from None

    def _begin(self) -> None:
        answer = self._send("POST", self._repository.uploads, accepted=(202,))
        self._session, self._sent = self._next(answer), 0
        least = answer.headers.get("oci-chunk-min-length", "")
        if least.isdecimal() and len(least) < 12:
            self._chunk_bytes = max(self._chunk_bytes, int(least))

    def _send_chunk(self, session: httpx.URL) -> None:
        begin, end = self._sent, min(self._layer.size, self._sent + self._chunk_bytes)
        answer = self._send(
            "PATCH",
            session,
            accepted=(202, 204),
            content=lambda: self._pieces(begin, end),
            headers={
                "content-type": "application/octet-stream",
                "content-length": str(end - begin),
                "content-range": f"{begin}-{end - 1}",
            },
        )
        self._session, self._sent = self._next(answer), self._received(answer, end)
        if self._sent - begin < min(PROGRESS_BYTES, end - begin):
            raise TransientError("the registry stored too little of a chunk")

    def _finish(self, session: httpx.URL) -> None:
        url = session.copy_merge_params({"digest": self._layer.digest})
        self._send("PUT", url, accepted=(201, 204), headers={"content-length": "0"})
        self._complete = True

    def _resume(self) -> None:
        """Continues after a failure: the blob may be complete, the session may still exist, or
        neither."""
        if is_present(self._layer.digest, self._repository, self._http):
            self._sent, self._complete = self._layer.size, True
            return
        if self._session is None:
            return
        try:
            answer = self._send("GET", self._session, accepted=(200, 204))
        except StatusError:
            self._session, self._sent = None, 0
            return
        self._session, self._sent = self._next(answer), self._received(answer, 0)

    def _pieces(self, begin: int, end: int) -> Iterator[bytes]:
        self._content.seek(begin)
        while begin < end:
            piece = self._content.read(min(PIECE_BYTES, end - begin))
            if not piece:
                raise StoreError(f"{self._layer.digest}: the blob has become shorter.")
            yield piece
            begin += len(piece)
            self._report(begin)

    def _send(
        self,
        method: str,
        url: httpx.URL,
        *,
        accepted: tuple[int, ...],
        content: Callable[[], Iterator[bytes]] | None = None,
        headers: dict[str, str] | None = None,
    ) -> Response:
        return self._http.send(
            method,
            url,
            accepted=accepted,
            content=content,
            headers=headers,
            credentials=self._repository.token,
        )

    def _next(self, answer: Response) -> httpx.URL:
        """The address of the session. SourceError if it is on another host: the blob is sent to the
        registry only."""
        try:
            target = answer.url.join(answer.headers.get("location", str(answer.url)))
        except httpx.InvalidURL:
            raise SourceError(f"{answer.url.host} states an invalid URL for an upload.") from None
        self._http.check(target, linked_from=answer.url)
        if not same_origin(target, self._repository.pages):
            raise SourceError(
                f"{answer.url.host} wants the upload at {target.host}; blobs are sent to the "
                "registry itself only."
            )
        return target

    def _received(self, answer: Response, default: int) -> int:
        """The number of bytes that the registry reports. After a chunk, "0-0" means one byte,
        otherwise none."""
        stated = _RANGE.fullmatch(answer.headers.get("range", "").strip())
        if stated is None:
            return default
        received = int(stated[1]) + 1 if int(stated[1]) else min(default, 1)
        if received > self._layer.size:
            raise SourceError(f"{answer.url.host} states to have more bytes than the blob has.")
        return received

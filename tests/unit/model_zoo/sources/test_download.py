"""Downloads of blobs: in ranges, resumed after failures and kills, never beyond the stated size."""

import errno
import gzip
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from httpx import URL

from model_zoo.sources import http, partial
from model_zoo.sources.download import DownloadStreams
from model_zoo.sources.pull import PullProgress, pull
from model_zoo.sources.reference import RegistrySource, parse_source
from model_zoo.store.manifest import MAX_MANIFEST_BYTES
from model_zoo.store.store import Store, journal_of
from runtime.errors import SourceError, StoreError
from tests.checkout import ROOT
from tests.loopback import Answering, Exchange, Server, digest, serving
from tests.patience import HANG_S, wait_until
from tests.published import Registry

PART = 256 << 10
WEIGHTS = random.Random(7).randbytes(4 * PART + 1000)
BLOB = digest(WEIGHTS)
CHUNKED = {"transfer-encoding": "chunked"}
STREAMS = DownloadStreams(count=3, part_bytes=PART)
PULLING = f"""
import sys
from pathlib import Path
import httpx
from model_zoo.sources import http, partial
from model_zoo.sources.download import DownloadStreams
from model_zoo.sources.pull import pull
from model_zoo.sources.reference import parse_source
from model_zoo.store.store import Store
http.TIMEOUT = httpx.Timeout({HANG_S})
partial.COUNTED_BYTES = 1
reported = []
streams = DownloadStreams(count=3, part_bytes={PART})
pull(parse_source(sys.argv[1]), Store(Path(sys.argv[2])), progress=reported.append, streams=streams)
print(*{{progress.status for progress in reported}}, sep="\\n")
"""


def published(weights: Answering | None = None) -> Answering:
    """A registry of one model; `weights` handles the requests for its blob."""
    registry = Registry()
    registry.publish("library/m:latest", [("model", WEIGHTS), ("system", b"Be brief.")])

    def answering(exchange: Exchange) -> None:
        (weights if weights and exchange.path.endswith(BLOB) else registry)(exchange)

    return answering


def source(server: Server) -> RegistrySource:
    parsed = parse_source(f"ollama://{server.host}/library/m")
    assert isinstance(parsed, RegistrySource)
    return parsed


def fetch(server: Server, store: Store, streams: DownloadStreams = STREAMS) -> bytes:
    fetched = pull(source(server), store, streams=streams, first_pause_s=0.001)
    return fetched.files[0].read_bytes()


def ranges(server: Server) -> list[str | None]:
    asked = [e.headers.get("range") for e in server.exchanges if e.path.endswith(BLOB)]
    return sorted(asked, key=lambda text: int(text[6:].partition("-")[0]) if text else -1)


def test_a_blob_is_downloaded_in_parallel_ranges(store) -> None:
    together = threading.Barrier(STREAMS.count, timeout=HANG_S)

    def weights(exchange: Exchange) -> None:
        if exchange.range_of(WEIGHTS)[0] < STREAMS.count * PART:
            together.wait()  # passes only if all ranges are requested concurrently
        exchange.content(WEIGHTS)

    with serving(published(weights)) as server:
        assert fetch(server, store) == WEIGHTS
        assert server.sent(BLOB) == len(WEIGHTS)
        begins = range(0, len(WEIGHTS), PART)
        assert ranges(server) == [
            f"bytes={begin}-{min(begin + PART, len(WEIGHTS)) - 1}" for begin in begins
        ]


def start(server: Server, store: Store) -> subprocess.Popen:
    command = [sys.executable, "-c", PULLING, str(source(server)), str(store.root)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_a_download_resumes_after_the_process_is_killed(store) -> None:
    """A quarter of each running part is sent; then the process is killed."""
    quarter = PART // 4
    alive = threading.Event()

    def stalling(exchange: Exchange) -> None:
        begin, end = exchange.range_of(WEIGHTS)
        stated = {"content_range": f"bytes {begin}-{end - 1}/{len(WEIGHTS)}"}
        exchange.begin(206, {"content-length": str(end - begin), **stated})
        exchange.send(WEIGHTS[begin : begin + quarter])
        alive.wait(HANG_S)
        exchange.handler.close_connection = True

    partial = store.partial(BLOB)

    def has_come() -> bool:
        if not partial.exists() or partial.stat().st_size != len(WEIGHTS):
            return False
        here, counts = partial.read_bytes(), journal_of(partial).read_bytes()[16:]
        begins = [0, PART, 2 * PART]
        return all(
            here[b : b + quarter] == WEIGHTS[b : b + quarter]
            and int.from_bytes(counts[8 * n : 8 * n + 8], "little") == quarter
            for n, b in enumerate(begins)
        )

    with serving(published(stalling)) as server:
        process = start(server, store)
        wait_until(has_come)
        process.send_signal(signal.SIGKILL)
        process.wait()
        alive.set()
    assert not store.names()
    with serving(published()) as server:
        assert fetch(server, store) == WEIGHTS
        assert server.sent(BLOB) == len(WEIGHTS) - 3 * quarter
        assert ranges(server)[0] == f"bytes={quarter}-{PART - 1}"
    assert sorted(path.name for path in partial.parent.glob("*partial*")) == []


def test_two_processes_that_pull_at_once_download_once(store) -> None:
    both, asked = threading.Event(), []

    def weights(exchange: Exchange) -> None:
        both.wait(HANG_S)
        exchange.content(WEIGHTS)

    answering = published(weights)

    def counting(exchange: Exchange) -> None:
        asked.append(exchange.path)
        answering(exchange)

    with serving(counting) as server:
        processes = [start(server, store) for _ in range(2)]
        wait_until(lambda: sum("/manifests/" in path for path in asked) == 2)
        both.set()
        said = [process.communicate(timeout=HANG_S)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0]
        assert server.sent(BLOB) == len(WEIGHTS)
    assert all("success" in text for text in said)
    assert store.open(source(server).name).files[0].read_bytes() == WEIGHTS


def test_a_blob_with_the_wrong_digest_is_removed_and_downloaded_again(store) -> None:
    wrong = bytes([WEIGHTS[0] ^ 1]) + WEIGHTS[1:]
    with serving(published(lambda exchange: exchange.content(wrong))) as server:
        with pytest.raises(SourceError, match=r"has the digest sha256:\w+, not sha256:"):
            fetch(server, store)
        assert store.names() == [] and not store.blob(BLOB).exists()
    with serving(published()) as server:
        assert fetch(server, store) == WEIGHTS
        assert server.sent(BLOB) == len(WEIGHTS)


def test_broken_connections_are_resumed(store) -> None:
    def breaking(exchange: Exchange) -> None:
        begin, end = exchange.range_of(WEIGHTS)
        stated = {"content_range": f"bytes {begin}-{end - 1}/{len(WEIGHTS)}"}
        exchange.begin(206, {"content-length": str(end - begin), **stated})
        exchange.send(WEIGHTS[begin : min(end, begin + PART // 3)])
        exchange.handler.close_connection = True

    with serving(published(breaking)) as server:
        assert fetch(server, store) == WEIGHTS
        assert server.sent(BLOB) == len(WEIGHTS)


def test_a_body_that_is_always_short_is_an_error_and_its_bytes_are_kept(store) -> None:
    def short(exchange: Exchange) -> None:
        begin, end = exchange.range_of(WEIGHTS)
        stated = {"content_range": f"bytes {begin}-{end - 1}/{len(WEIGHTS)}"}
        exchange.begin(206, {"content-length": str(end - begin), **stated})
        exchange.send(WEIGHTS[begin : begin + 100])
        exchange.handler.close_connection = True

    with serving(published(short)) as server:
        with pytest.raises(SourceError, match="6 times in a row"):
            fetch(server, store)
        first = server.sent(BLOB)
    with serving(published()) as server:
        assert fetch(server, store) == WEIGHTS
        assert len(WEIGHTS) - first <= server.sent(BLOB) < len(WEIGHTS)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_requests_to_an_overloaded_server_are_repeated(store, status) -> None:
    seen: set[str | None] = set()

    def busy_first(exchange: Exchange) -> None:
        asked = exchange.headers.get("range")
        if asked in seen:
            exchange.content(WEIGHTS)
        else:
            seen.add(asked)
            exchange.answer(status=status, retry_after="0")

    with serving(published(busy_first)) as server:
        assert fetch(server, store) == WEIGHTS


@pytest.mark.parametrize(
    ("stated", "date", "pause_s"),
    [
        ("90", None, 90),
        ("Sat, 28 Nov 2026 23:01:30 GMT", "Sat, 28 Nov 2026 23:00:00 GMT", 90),
        ("Sat, 28 Nov 2026 22:00:00 GMT", "Sat, 28 Nov 2026 23:00:00 GMT", 0),
        ("Sat, 28 Nov 2026 23:01:30 GMT", "soon", 0),
        ("Sat, 28 Nov 2026 23:01:30 -0000", "Sat, 28 Nov 2026 23:00:00 GMT", 0),
        ("soon", None, 0),
        ("1e9", None, 0),
        ("1234567", None, 0),
        ("", None, 0),
    ],
)
def test_a_server_states_a_pause_in_seconds_or_as_a_date(stated, date, pause_s) -> None:
    def limited(exchange: Exchange) -> None:
        exchange.handler.send_response_only(429)  # without a date
        headers = {"retry-after": stated, "date": date, "content-length": "0"}
        for name, value in headers.items():
            if value is not None:
                exchange.handler.send_header(name, value)
        exchange.handler.end_headers()

    with serving(limited) as server, closing(http.Http()) as client:
        with pytest.raises(http.TransientError) as caught, client.stream(URL(server.url)):
            pass
        assert caught.value.retry_after_s == pause_s


def test_a_pause_of_the_calling_thread_is_reported_and_can_be_ended(store) -> None:
    statuses: list[str] = []

    def report(progress: PullProgress) -> None:
        statuses.append(progress.status)
        if progress.status.startswith("waiting"):
            raise KeyboardInterrupt

    def limited(exchange: Exchange) -> None:
        exchange.answer(status=429, retry_after="86400")

    with serving(limited) as server, pytest.raises(KeyboardInterrupt):
        pull(source(server), store, progress=report)
    assert statuses == ["pulling manifest", f"waiting for {server.host.partition(':')[0]}"]


def test_a_long_retry_after_is_limited_and_clients_do_not_retry_together() -> None:
    pauses: list[float] = []

    def busy() -> None:
        raise http.TransientError("busy", retry_after_s=86400)

    with pytest.raises(SourceError, match="host: busy, 6 times in a row"):
        http.Http().retrying("host", sleep=pauses.append)(busy)
    assert len(set(pauses)) == http.MAX_ATTEMPTS - 1
    longest = (1 + http.PAUSE_SPREAD) * http.MAX_PAUSE_S
    assert all(http.MAX_PAUSE_S <= pause <= longest for pause in pauses)


def test_a_blob_without_ranges_is_read_from_its_beginning(store) -> None:
    calls = []

    def whole(exchange: Exchange) -> None:
        calls.append(exchange.headers.get("range"))
        exchange.begin(200, {"content-length": str(len(WEIGHTS))})
        broken = len(calls) == 4
        exchange.send(WEIGHTS[: PART if broken else len(WEIGHTS)])
        exchange.handler.close_connection = broken

    with serving(published(whole)) as server:
        assert fetch(server, store) == WEIGHTS


@pytest.mark.parametrize(
    "stated",
    [
        f"bytes 1-{PART - 1}/{len(WEIGHTS)}",
        f"bytes 0-{PART}/{len(WEIGHTS)}",
        f"bytes 0-{PART - 1}/{len(WEIGHTS) + 1}",
        f"items 0-{PART - 1}/{len(WEIGHTS)}",
        "",
    ],
)
def test_a_range_that_was_not_requested_is_refused(store, stated) -> None:
    """One thing is wrong in each, in the answer for one part."""

    def other(exchange: Exchange) -> None:
        if exchange.range_of(WEIGHTS)[0]:
            exchange.content(WEIGHTS)
        else:
            exchange.answer(WEIGHTS[:PART], status=206, content_range=stated)

    with serving(published(other)) as server, pytest.raises(SourceError, match="another range"):
        fetch(server, store)


def endless(exchange: Exchange) -> None:
    """Sends chunks without end, as fast as they are read."""
    begin, end = exchange.range_of(WEIGHTS)
    stated = {"content_range": f"bytes {begin}-{end - 1}/{len(WEIGHTS)}"}
    exchange.begin(206 if "range" in exchange.headers else 200, {**CHUNKED, **stated})
    while True:
        exchange.handler.wfile.write(b"4000\r\n" + b" " * 0x4000 + b"\r\n")
        exchange.sent += 0x4000


def test_a_blob_that_never_ends_is_stopped_at_its_size(store) -> None:
    refused = pytest.raises(SourceError, match="sends more bytes than the blob has")
    with serving(published(endless)) as server, refused:
        fetch(server, store)
    assert store.partial(BLOB).stat().st_size == len(WEIGHTS)


def test_a_manifest_that_never_ends_is_stopped_at_the_limit(store) -> None:
    with serving(endless) as server:
        with pytest.raises(SourceError, match="sends more than 4,194,304 bytes"):
            fetch(server, store)
        assert server.exchanges[0].sent < MAX_MANIFEST_BYTES + (32 << 20)  # the buffers of sockets


def test_a_manifest_that_is_sent_slowly_is_stopped_at_the_deadline(store, monkeypatch) -> None:
    monkeypatch.setattr(http, "READ_DEADLINE_S", 0.2)

    def dripping(exchange: Exchange) -> None:
        exchange.begin(200, CHUNKED)
        while True:
            exchange.handler.wfile.write(b"1\r\n \r\n")
            time.sleep(0.02)

    with (
        serving(dripping) as server,
        pytest.raises(SourceError, match=r"did not finish its response within 0\.2 s"),
    ):
        fetch(server, store)


def test_compressed_bodies_are_refused(store) -> None:
    bomb = gzip.compress(bytes(64 << 20))

    def packed(exchange: Exchange) -> None:
        assert exchange.headers["accept-encoding"] == "identity"
        exchange.answer(bomb, content_encoding="gzip")

    with (
        serving(packed) as server,
        pytest.raises(SourceError, match=r"compresses its data \(gzip\)"),
    ):
        fetch(server, store)
    with serving(published(packed)) as server, pytest.raises(SourceError, match="compresses"):
        fetch(server, store)


def test_an_unreachable_server_is_an_error(store) -> None:
    with serving(published()) as server:
        gone = source(server)
    with pytest.raises(
        SourceError, match=r"127\.0\.0\.1: ConnectError.* 6 times in a row"
    ) as caught:
        pull(gone, store, first_pause_s=0.001)
    assert str(caught.value).startswith(f"{gone}: ")


def test_an_inconsistent_journal_is_ignored(store) -> None:
    partial = store.partial(BLOB)
    for notes in (b"", b"x" * 7, b"\xff" * 56, bytes(56)):
        partial.write_bytes(bytes(len(WEIGHTS)))
        journal_of(partial).write_bytes(notes)
        with serving(published()) as server:
            assert fetch(server, store) == WEIGHTS
            assert server.sent(BLOB) == len(WEIGHTS)
        store.remove(source(server).name)


def test_an_interrupt_while_threads_start_leaves_none_behind(store, monkeypatch) -> None:
    """`ThreadPoolExecutor` does not know a thread whose start is interrupted."""
    asked, go_on = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    class Interrupted(ThreadPoolExecutor):
        def submit(self, work, *arguments):
            threads.append(threading.Thread(target=work, args=arguments))
            threads[0].start()
            assert asked.wait(HANG_S)
            raise KeyboardInterrupt

    def silent(exchange: Exchange) -> None:
        asked.set()
        go_on.wait(HANG_S)

    monkeypatch.setattr("model_zoo.sources.download.ThreadPoolExecutor", Interrupted)
    with serving(published(silent)) as server:
        try:
            with pytest.raises(KeyboardInterrupt):
                fetch(server, store)
            assert not threads[0].is_alive()
        finally:
            go_on.set()


def test_a_full_disk_is_an_error_and_received_bytes_are_kept(store, monkeypatch) -> None:
    room = PART

    def write(file: int, data: bytes, at: int) -> int:
        nonlocal room
        room -= len(data)
        if room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return true_write(file, data, at)

    true_write = os.pwrite
    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(partial, "COUNTED_BYTES", 1)
    # Each of several streams would lose a piece whose size depends on scheduling.
    one = DownloadStreams(count=1, part_bytes=PART)
    with serving(published()) as server, pytest.raises(StoreError, match="the disk is full"):
        fetch(server, store, one)
    monkeypatch.undo()
    with serving(published()) as server:
        assert fetch(server, store) == WEIGHTS
        assert server.sent(BLOB) <= len(WEIGHTS) - PART // 2


def test_a_link_at_the_path_of_a_download_is_not_followed(store, tmp_path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    store.partial(BLOB).symlink_to(victim)
    with serving(published()) as server, pytest.raises(StoreError, match="cannot write"):
        fetch(server, store)
    assert victim.read_bytes() == b"precious"

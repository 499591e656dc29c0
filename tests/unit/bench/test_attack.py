"""The parts of `make attack` that need no server: findings on this host, output, exit status."""

import asyncio
import errno
import resource
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest
import yaml

from bench.attack import __main__ as attack
from bench.attack import bodies, connections, host, models, processes, tenants
from bench.attack.bystander import Measurements
from bench.attack.connections import Held
from bench.attack.models import _bomb
from bench.attack.outcome import Outcome
from bench.attack.processes import tcp_listeners, unix_sockets, watching_memory
from bench.attack.target import Keys, Target, _arguments, source_address
from model_zoo.gguf.reader import GGUFFile
from runtime.errors import ModelFileError
from tests.loopback import free_port
from tests.patience import HANG_S

HELD = Outcome("one", "a try", "nothing", held=True)
NOT_HELD = Outcome("two", "another", "a long gap", held=False)


@pytest.fixture
def loopback() -> str:
    return "127.0.0.1"


def test_listeners_of_a_process_are_found_with_their_addresses(loopback) -> None:
    with ExitStack() as open_sockets:
        four = open_sockets.enter_context(socket.create_server((loopback, 0)))
        anywhere = open_sockets.enter_context(socket.create_server(("0.0.0.0", 0)))
        found = {(each.address, each.port) for each in tcp_listeners("")}
        assert {four.getsockname(), anywhere.getsockname()} <= found
    assert not tcp_listeners("no process has this title")


@pytest.mark.parametrize(("socket_mode", "reached"), [(0o777, True), (0o600, False)])
def test_sockets_that_others_may_reach_are_found_by_their_modes(socket_mode, reached) -> None:
    with TemporaryDirectory() as place, socket.socket(socket.AF_UNIX) as bound:
        folder = Path(place)  # pytest's own are below a private one
        path = folder / "admin"
        bound.bind(str(path))
        path.chmod(socket_mode)
        assert path in unix_sockets("")
        folder.chmod(0o755)
        assert host._others_may_connect(path) == reached
        folder.chmod(0o700)
        assert not host._others_may_connect(path)


@pytest.mark.parametrize(("outcomes", "status"), [([HELD], 0), ([HELD, NOT_HELD], 1), ([], 1)])
def test_the_exit_status_is_0_only_if_all_attacks_were_held(
    monkeypatch, capsys, outcomes, status
) -> None:
    async def told(target: Target) -> list[Outcome]:
        assert target.url == "http://127.0.0.1:1"
        return outcomes

    monkeypatch.setattr(attack, "OPEN", (told,))
    assert attack.main(["http://127.0.0.1:1/"]) == status
    printed = capsys.readouterr().out
    for outcome in outcomes:
        verdict = "held" if outcome.held else "NOT HELD"
        assert f"{verdict}: {outcome.name}: {outcome.tried}: {outcome.bystander}\n" in printed


def test_an_attack_that_breaks_off_was_not_held(monkeypatch, capsys) -> None:
    async def breaks(target: Target) -> list[Outcome]:
        raise ConnectionError("gone")

    monkeypatch.setattr(attack, "OPEN", (breaks,))
    assert attack.main(["http://127.0.0.1:1"]) == 1
    assert "NOT HELD" in capsys.readouterr().out


async def test_connections_that_the_server_ends_are_counted(monkeypatch, loopback) -> None:
    monkeypatch.setattr(connections, "DEADLINE_S", 1.0)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (await reader.readexactly(1)) == b"s":
            writer.write(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
        else:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, loopback)
    port = server.sockets[0].getsockname()[1]
    ended = await connections._hold_back(loopback, port, 5, b"s")
    assert (ended.opened, ended.closed, ended.replies) == (5, 5, {"408": 5})
    left = await connections._hold_back(loopback, port, 5, b"x")
    assert (left.opened, left.closed) == (5, 0)
    server.close()


@pytest.mark.parametrize(
    ("held", "all_closed"),
    [
        (Held(opened=64, refused=136, closed=0), False),
        (Held(opened=64, refused=136, closed=63), False),
        (Held(opened=64, refused=136, closed=64), True),
        (Held(refused=200), False),
    ],
)
def test_refused_connections_are_not_closed_ones(held: Held, all_closed: bool) -> None:
    assert held.all_closed == all_closed


async def test_connections_that_the_attacker_cannot_open_are_not_refused_ones(
    monkeypatch, loopback
) -> None:
    async def full(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(asyncio, "open_connection", full)
    with pytest.raises(OSError, match="Too many open files"):
        await connections._hold_back(loopback, 1, 1, b"x")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    with pytest.raises(OSError, match="needs 4,712 open files; the limit is 1,024"):
        connections._allow_files(4712)


async def test_the_growth_of_a_process_below_the_largest_is_measured_at_its_peak(
    monkeypatch,
) -> None:
    sizes = iter([{"1": 700, "2": 20}, {"1": 700, "2": 620}, {"1": 701, "2": 30, "3": 50}])
    monkeypatch.setattr(processes, "_resident_bytes", lambda _: next(sizes))
    async with watching_memory("") as growth:
        while not growth.bytes:
            await asyncio.sleep(0)
    assert growth.bytes == 600


@pytest.fixture
def refusing(monkeypatch, tmp_path) -> Target:
    """A server that refuses everything, while a bystander sees nothing of it."""

    @asynccontextmanager
    async def calm(*_: object, **__: object) -> AsyncIterator[Measurements]:
        yield Measurements(health=[0.0], gaps=[0.0])

    refuses = httpx.MockTransport(lambda _: httpx.Response(403))
    monkeypatch.setattr(httpx, "AsyncClient", partial(httpx.AsyncClient, transport=refuses))
    monkeypatch.setattr(models, "watching", calm)
    monkeypatch.setattr(models, "WATCHED_S", 0.0)
    monkeypatch.setattr(models, "BOMB_KEYS", 10)
    monkeypatch.setattr(models, "MAX_UPLOAD_BYTES", 2**20)
    monkeypatch.setattr(tenants, "FLOOD_S", 0.0)
    monkeypatch.setattr(tenants, "PAUSE_S", 0.0)

    async def quick(target: Target) -> float:
        await asyncio.sleep(0)
        return 0.0

    monkeypatch.setattr(tenants, "_first_token_s", quick)
    return Target("http://127.0.0.1:1", Keys(), store=tmp_path)


@pytest.mark.parametrize(
    "attempt",
    [
        partial(models._template, name="a", template="b"),
        models._header_bomb,
        models._upload_without_length,
        models._aborted_uploads,
        tenants._flood,
    ],
    ids=["template", "header bomb", "upload", "aborted uploads", "flood"],
)
async def test_an_attack_that_was_refused_at_once_was_not_held(refusing, attempt) -> None:
    assert not (await attempt(refusing)).held


def test_only_attackers_on_loopback_have_another_address_than_the_bystander() -> None:
    assert source_address("127.0.0.1") == source_address("localhost") == ("127.0.0.2", 0)
    assert source_address("192.0.2.7") is source_address("::1") is None


@pytest.mark.parametrize(("status", "held"), [("413", True), (bodies.NOT_CONNECTED, False)])
async def test_a_body_that_reached_no_server_was_not_held(refusing, monkeypatch, status, held):
    monkeypatch.setattr(bodies, "watching", models.watching)
    monkeypatch.setattr(bodies, "_in_other_process", lambda *_: Counter({status: 3}))
    outcome = await bodies._outcome(refusing, "a", "b", bodies.BOMBS[0])
    assert (outcome.held, outcome.tried) == (held, f"b; replies: 3 × {status}")


def test_a_client_that_cannot_connect_says_so(loopback) -> None:
    assert bodies._exchange(loopback, free_port(), b"", b"", HANG_S) == bodies.NOT_CONNECTED


def test_keys_are_stored_as_hashes_alone() -> None:
    keys = Keys()
    entries = str(keys.entries())
    assert not any(key in entries for key in (keys.alice, keys.bob, keys.manager))
    assert [entry["manage"] for entry in keys.entries()] == [False, False, True]


def test_the_header_bomb_is_a_model_file_but_for_its_number_of_keys(tmp_path, monkeypatch) -> None:
    path = tmp_path / "bomb.gguf"
    path.write_bytes(_bomb())
    with pytest.raises(ModelFileError, match="1,000,000"):
        GGUFFile.open(path)


def test_the_arguments_can_be_written_and_name_no_key(tmp_path) -> None:
    keys = Keys()
    written = yaml.safe_dump(_arguments(tmp_path, keys))
    assert not any(key in written for key in (keys.alice, keys.bob, keys.manager))
    assert (tmp_path / "keys.yaml").stat().st_mode & 0o777 == 0o600
    open_to_all = yaml.safe_load(yaml.safe_dump(_arguments(tmp_path, None)))
    assert "on_demand" not in open_to_all

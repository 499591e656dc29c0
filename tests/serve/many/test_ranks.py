"""A model divided among two processes, one of which is killed."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
from ray import serve

from tests.patience import HANG_S
from tests.serve.application import CALL_TIMEOUT_S, eventually
from tests.serve.many.application import NAME

TIMEOUT = httpx.Timeout(HANG_S)
MODEL = "fixed"


def test_a_model_over_two_ranks_answers_and_is_replaced_when_one_dies(application, url) -> None:
    expected = answer(application.url, "demo")
    assert answer(url, MODEL) == expected
    (rank,), replica = ranks(), replica_pid()
    os.kill(rank, signal.SIGKILL)
    eventually(lambda: replica_pid() != replica)
    eventually(lambda: len(ranks()) == 1 and not Path(f"/proc/{replica}").exists())
    assert rank not in ranks()
    assert answer(url, MODEL) == expected


def answer(url: str, model: str) -> str:
    options = {"temperature": 0, "num_predict": 16}
    body = {"model": model, "prompt": "What is 17 + 25?", "stream": False, "options": options}
    reply = httpx.post(f"{url}/api/generate", json=body, timeout=TIMEOUT)
    assert reply.status_code == 200, reply.text
    assert reply.json()["eval_count"] > 0
    return reply.json()["response"]


def replica_pid() -> int:
    handle = serve.get_deployment_handle(MODEL, NAME).options(method_name="describe")
    return handle.remote().result(timeout_s=CALL_TIMEOUT_S).pid


def ranks() -> list[int]:
    """The processes of other ranks than the first, of this test's cluster alone."""
    found = []
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if (process / "cmdline").read_bytes().startswith(b"ray::_Rank"):
                found.append(int(process.name))
    return [pid for pid in found if os.getpid() in ancestors(pid)]


def ancestors(pid: int) -> Iterator[int]:
    with suppress(OSError):
        while pid > 1:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            pid = int(fields[1])
            yield pid

"""A cluster of two hosts with different addresses: answers do not depend on the host, and streams
of a host that is silently disconnected continue. `make test-hosts`; needs root and iproute2."""

import json
import secrets
import time
from base64 import b64encode
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import yaml

from tests.checkout import DEMO_MODEL, ROOT
from tests.hosts.hosts import Host, hosts, possible
from tests.patience import HANG_S
from tests.serve.application import ENDLESS, await_http, short_folder

CROWD = 8
pytestmark = [
    pytest.mark.skipif(not possible(), reason="hosts cannot be made here: no root, or no `ip`"),
]
DEMO = {
    "source": str(DEMO_MODEL),
    "context_tokens": 1024,
    "device": "cpu",
    "threads": 1,
}
ARGS = {
    "models": [
        # Each host has room for one replica.
        {
            **DEMO,
            "name": "demo",
            "replicas": 2,
            "num_cpus": 2,
            "vision": {"placement": "pool", "device": "cpu", "replicas": 1, "num_cpus": 0.5},
        },
        {
            **DEMO,
            "name": "divided",
            "num_cpus": 1,
            "parallel": {"tensor": 2, "placement": "strict_spread"},
        },
    ]
}
LONG = {**ENDLESS, "num_predict": 900}
GREEDY = {"temperature": 0, "num_predict": 24}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Sequence[Host]]:
    """A cluster as README describes it for several machines."""
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "CARAVAN_MODELS": str(folder / "store"),
    }
    config = yaml.safe_load((ROOT / "configs" / "tensor_parallel.yaml").read_text())
    config["applications"][0]["args"] = ARGS
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    with hosts(2, environment) as (first, second):
        own = ("--num-cpus=4", f"--object-store-memory={80 * 2**20}")
        head = ("--head", "--port=6379", f"--temp-dir={folder}/1")
        first.run("ray", "start", f"--node-ip-address={first.address}", *head, *own)
        joined = (f"--address={first.address}:6379", f"--temp-dir={folder}/2")
        second.run("ray", "start", f"--node-ip-address={second.address}", *joined, *own)
        first.run("serve", "deploy", folder / "config.yaml")
        for host in (first, second):
            await_http(url(host))
        yield first, second


def url(host: Host) -> str:
    return f"http://{host.address}:8000"


def ask(host: Host, model: str, text: str, *images: bytes) -> str:
    message = {"role": "user", "content": text, "images": [b64encode(i).decode() for i in images]}
    body = {"model": model, "messages": [message], "stream": False, "options": GREEDY}
    reply = httpx.post(f"{url(host)}/api/chat", json=body, timeout=HANG_S)
    assert reply.status_code == 200, reply.text
    return reply.json()["message"]["content"]


def test_answers_are_the_same_wherever_replicas_encoders_and_ranks_run(cluster) -> None:
    def answers(text: str, *images: bytes) -> set[str]:
        models = ("demo", "divided")
        return {ask(host, model, text, *images) for host in cluster for model in models}

    assert answers("What is 17 + 25?") == {"17 + 25 = 42."}
    picture = (ROOT / "models" / "demo.png").read_bytes()
    assert len(answers("What is in the picture?", picture)) == 1


def stream(host: Host, seed: int) -> tuple[str, float]:
    """The answer, and the longest time without a part of it, in seconds."""
    body = {"model": "demo", "prompt": "a", "raw": True, "options": {**LONG, "seed": seed}}
    said, gap_s, before = "", 0.0, time.monotonic()
    with httpx.stream("POST", f"{url(host)}/api/generate", json=body, timeout=HANG_S) as reply:
        for line in reply.iter_lines():
            part, now = json.loads(line), time.monotonic()
            assert "error" not in part, part
            said, gap_s, before = said + part["response"], max(gap_s, now - before), now
    assert part["done"]
    return said, gap_s


def test_streams_of_a_disconnected_host_continue_on_the_other(cluster) -> None:
    """The host without the ingress is cut off: connections to a lost ingress break."""
    here = next(host for host in cluster if serves_http(host))
    (other,) = set(cluster) - {here}
    undisturbed = [stream(here, seed)[0] for seed in range(CROWD)]
    with ThreadPoolExecutor(CROWD) as pool:
        streams = [pool.submit(stream, here, seed) for seed in range(CROWD)]
        time.sleep(1.0)
        other.pull_cable()
        try:
            begun = time.monotonic()
            assert ask(here, "demo", "What is 17 + 25?") == "17 + 25 = 42."
            # Long before TCP gives a connection up, which takes two minutes.
            assert time.monotonic() - begun < 60, "a host that does not answer is passed over"
            told = [each.result() for each in streams]
        finally:
            other.plug_in()
    assert [said for said, _ in told] == undisturbed
    assert max(gap_s for _, gap_s in told) > 2, "none was there when it was cut off"


def serves_http(host: Host) -> bool:
    commands = (Path(f"/proc/{pid}/cmdline").read_bytes() for pid in host.processes())
    return any(b"ServeReplica:" in each and b"Ingress" in each for each in commands)

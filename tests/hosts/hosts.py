"""Hosts in this machine: network namespaces with addresses and links that can be cut."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.checkout import ROOT
from tests.patience import HANG_S

BIN = Path(sys.executable).parent
BRIDGE, NETWORK = "caravan-net", "10.212.79"


class Host:
    """A host, by its number from 1; it reaches the other hosts, and this process reaches it."""

    def __init__(self, number: int, environment: dict[str, str]) -> None:
        self.name, self.cable = f"caravan-host{number}", f"caravan-eth{number}"
        self.address = f"{NETWORK}.{number}"
        self._environment = {**os.environ, **environment}

    def run(self, *command: str | Path) -> None:
        """One of the programs that are installed here, on that host, until it ends."""
        program, *arguments = command
        done = subprocess.run(
            ["ip", "netns", "exec", self.name, BIN / program, *arguments],
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"

    def processes(self) -> list[int]:
        return [int(pid) for pid in ip("netns", "pids", self.name).split()]

    def pull_cable(self) -> None:
        ip("link", "set", self.cable, "down")

    def plug_in(self) -> None:
        ip("link", "set", self.cable, "up")

    def _appear(self) -> None:
        ip("netns", "add", self.name)
        ip("link", "add", self.cable, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        ip("link", "set", self.cable, "master", BRIDGE, "up")
        ip("-n", self.name, "address", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            ip("-n", self.name, "link", "set", device, "up")

    def _vanish(self) -> None:
        for pid in self.processes():
            os.kill(pid, 9)
        # Linux deletes it with the namespace, but some time later, when its name may be needed.
        ip("link", "delete", self.cable)
        ip("netns", "delete", self.name)


def ip(*arguments: str) -> str:
    return subprocess.run(
        ["ip", *arguments], check=True, capture_output=True, text=True, timeout=HANG_S
    ).stdout


def possible() -> bool:
    """Whether this process may create network namespaces."""
    try:
        ip("netns", "add", "caravan-trial")
        ip("netns", "delete", "caravan-trial")
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


@contextmanager
def hosts(count: int, environment: dict[str, str]) -> Iterator[Sequence[Host]]:
    """What runs on them ends with them. `environment`: of all that runs there."""
    ip("link", "add", BRIDGE, "type", "bridge")
    made: list[Host] = []
    try:
        ip("address", "add", f"{NETWORK}.254/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        for number in range(1, count + 1):
            host = Host(number, environment)
            host._appear()
            made.append(host)
        yield made
    finally:
        for host in made:
            host._vanish()
        ip("link", "delete", BRIDGE)

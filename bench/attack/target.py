"""The server that is attacked: `caravan serve` with temporary files, or any other server."""

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import yaml

from bench.server import QUICKSTART, Server
from serve_app.cli.ray_folders import ray_folder
from tests.checkout import DEMO_MODEL

MAX_UPLOAD_BYTES = 64 * 2**20
# The name of a model whose file attacks may overwrite.
REWRITTEN = "rewritten"
_ATTACKER = "127.0.0.2"


@dataclass(frozen=True, slots=True)
class Keys:
    """The API keys of two clients that may use models, and of one that may also manage them."""

    alice: str = field(default_factory=lambda: f"sk-alice-{secrets.token_hex(16)}")
    bob: str = field(default_factory=lambda: f"sk-bob-{secrets.token_hex(16)}")
    manager: str = field(default_factory=lambda: f"sk-manager-{secrets.token_hex(16)}")

    def entries(self) -> list[dict[str, Any]]:
        """The entries of these keys in `api_keys_file`."""
        return [
            {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), "manage": manage}
            for name, key, manage in (
                ("alice", self.alice, False),
                ("bob", self.bob, False),
                ("manager", self.manager, True),
            )
        ]


@dataclass(frozen=True, slots=True)
class Target:
    """A server. `keys`: None if it accepts requests without keys.

    Set only for a server that was started here: `session`, Ray's directory with the logs; `store`,
    the folder of models; `rewritten`, the file of the model REWRITTEN.
    """

    url: str
    keys: Keys | None = None
    session: Path | None = None
    store: Path | None = None
    rewritten: Path | None = None

    @property
    def port(self) -> int:
        return httpx.URL(self.url).port or 80

    @property
    def host(self) -> str:
        return httpx.URL(self.url).host

    @property
    def bystander_key(self) -> str | None:
        return None if self.keys is None else self.keys.bob

    def client(self, key: str | None = None) -> httpx.AsyncClient:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=120.0)


def source_address(host: str) -> tuple[str, int] | None:
    """The address of attackers of this host, and port 0. On loopback it is not that of the
    bystander, since limits are per address; elsewhere None, for any."""
    return (_ATTACKER, 0) if host == "localhost" or host.startswith("127.") else None


@contextmanager
def serving(keys: Keys | None) -> Iterator[Target]:
    """Runs `caravan serve` with temporary models and keys; waits until it answers."""
    with TemporaryDirectory(prefix="caravan-attack-") as place:
        folder = Path(place)
        server = Server.of_ray(
            _arguments(folder, keys),
            key=None if keys is None else keys.bob,
            variables={"CARAVAN_MODELS": str(folder / "store")},
        )
        with closing(server):
            yield Target(
                server.url,
                keys,
                (ray_folder(os.environ) / "ray" / "session_latest").resolve(),
                folder / "store",
                folder / "rewritten.gguf",
            )


def _arguments(folder: Path, keys: Keys | None) -> dict[str, Any]:
    """Those of the application."""
    [quickstart] = yaml.safe_load(QUICKSTART.read_text())["applications"]
    demo = {**quickstart["args"]["models"][0], "source": str(DEMO_MODEL), "threads": 1}
    if keys is None:
        return {"models": [demo]}
    demo["num_cpus"] = 0.2
    path = folder / "keys.yaml"
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(keys.entries()))
    source = str(shutil.copy(DEMO_MODEL, folder / "rewritten.gguf"))
    return {
        "models": [demo, {**demo, "name": REWRITTEN, "source": source}],
        "api_keys_file": str(path),
        "on_demand": {
            "num_cpus": 0.2,
            "max_upload_bytes": MAX_UPLOAD_BYTES,
            "model": {"context_tokens": 512, "threads": 1},
        },
    }

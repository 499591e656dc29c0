"""Folders of `caravan serve` for Ray and HAProxy."""

import os
import stat
import tempfile
from pathlib import Path

import pytest

from runtime.errors import ConfigurationError
from serve_app.cli.ray_folders import haproxy_folder, ray_folder, ray_token
from serve_app.cli.serve import environment
from tests.unit.serve_app.proxy_configs import HIGHEST_PID, LONGEST_SOCKET_PATH, sockets_beside

SOCKET_VARIABLES = ("RAY_SERVE_HAPROXY_SOCKET_PATH", "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH")
NODE_ID = "0" * 56
PLASMA = f"ray/session_2026-11-28_20-00-22_600594_{HIGHEST_PID}/sockets/plasma_store"


@pytest.fixture(params=["/tmp", "/dev/shm", "/tmp/long-name-of-a-folder-for-temporary-files"])
def temporary(request, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", request.param)
    return request.param


def test_haproxys_folder_is_private_and_short_and_removed(temporary):
    with haproxy_folder() as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert str(folder.parent) == (temporary if len(temporary) < 10 else "/tmp")
        variables = environment({}, 8000, folder)
        for path in map(Path, (variables[name] for name in SOCKET_VARIABLES)):
            own = path.parent / NODE_ID / path.name  # as Ray does
            for socket in (own, *sockets_beside(own)):
                assert len(str(socket)) <= LONGEST_SOCKET_PATH, socket
    assert not folder.exists()


def test_rays_folder_is_private_and_short_and_lasts(temporary, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 2**32 - 2)
    folder = ray_folder({})
    try:
        assert folder == ray_folder({"RAY_TMPDIR": ""})
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert len(str(folder / PLASMA)) <= 107
    finally:
        folder.rmdir()


def test_a_folder_that_is_too_long_for_rays_sockets_is_refused():
    longest = "/" + "x" * (107 - len(f"//{PLASMA}"))
    assert ray_folder({"RAY_TMPDIR": longest}) == Path(longest)
    with pytest.raises(ConfigurationError, match="RAY_TMPDIR has 40 bytes; more than 39 are too"):
        ray_folder({"RAY_TMPDIR": f"{longest}x"})


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    folder = Path(f"/tmp/caravan-{os.getpid()}x")
    monkeypatch.setattr(os, "getuid", lambda: f"{os.getpid()}x")
    folder.symlink_to(tmp_path)
    try:
        with pytest.raises(ConfigurationError, match="Set RAY_TMPDIR to another"):
            ray_folder({})
    finally:
        folder.unlink()


NO_HOME = "/proc/nobody"  # not even root can create it


def test_where_ray_cannot_keep_a_token_it_gets_one_at_each_start(monkeypatch):
    monkeypatch.setenv("HOME", NO_HOME)
    tokens = [ray_token({})["RAY_AUTH_TOKEN"] for _ in range(2)]
    assert len({*tokens}) == 2 and all(len(token) == 64 for token in tokens)


@pytest.mark.parametrize("variable", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"])
def test_a_token_of_the_user_is_kept(monkeypatch, variable):
    monkeypatch.setenv("HOME", NO_HOME)
    assert ray_token({variable: "x"}) == {}


@pytest.mark.parametrize("kept", [False, True])
def test_ray_keeps_its_token_in_the_home_directory(monkeypatch, tmp_path, kept):
    monkeypatch.setenv("HOME", str(tmp_path))
    if kept:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("x")
    assert ray_token({}) == {}
    assert len([*(tmp_path / ".ray").iterdir()]) == kept


def test_a_token_in_the_home_directory_that_cannot_be_read_is_not_used(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ray" / "auth_token").mkdir(parents=True)  # not even root can read it
    assert ray_token({})["RAY_AUTH_TOKEN"]

"""Where compiled kernels stay between processes."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from patience import DEADLINE

from hetcoll.config.env import read_config
from hetcoll.vendors.devices.kernels import Cache


def test_what_was_put_comes_back(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "deep" / "cache")
    assert cache.get("a") is None
    cache.put("a", b"one")
    cache.put("b", b"")
    assert (cache.get("a"), cache.get("b")) == (b"one", b"")
    cache.put("a", b"two")
    assert Cache(tmp_path / "deep" / "cache").get("a") == b"two"
    assert sorted(x.name for x in (tmp_path / "deep" / "cache").iterdir()) == ["a", "b"]
    assert (tmp_path / "deep" / "cache").stat().st_mode & 0o077 == 0


def test_damage_is_seen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = Cache(tmp_path / "cache")
    cache.put("a", b"some data")
    kept = tmp_path / "cache" / "a"
    whole = kept.read_bytes()
    for damaged in (whole[:-1], whole[:20], b"", whole[:40] + b"X" + whole[41:], whole + b"more"):
        kept.write_bytes(damaged)
        assert cache.get("a") is None
        assert "damaged" in caplog.text
        caplog.clear()
    cache.put("a", b"some data")
    assert cache.get("a") == b"some data"


def test_a_directory_that_others_can_write_to_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    cache = Cache(shared)
    cache.put("a", b"data")
    assert cache.get("a") is None
    assert not list(shared.iterdir())
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "can be written to by others" in warnings[0].getMessage()
    assert "HETCOLL_CACHE" in warnings[0].getMessage()


def test_a_cache_that_cannot_be_made_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = Cache(tmp_path / "file" / "cache")
    for _ in range(3):
        cache.put("a", b"data")
        assert cache.get("a") is None
    assert [("cannot be made" in r.getMessage()) for r in caplog.records] == [True]


def test_writers_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    values = [bytes([i]) * (1000 * i + 1) for i in range(8)]

    def write(value: bytes) -> None:
        for _ in range(50):
            cache = Cache(tmp_path / "cache")
            cache.put("a", value)
            assert cache.get("a") in values

    threads = [threading.Thread(target=write, args=(value,)) for value in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert os.listdir(tmp_path / "cache") == ["a"]
    assert Cache(tmp_path / "cache").get("a") in values


def test_the_environment_says_where() -> None:
    assert read_config({"HOME": "/home/me"}).cache == "/home/me/.cache/hetcoll"
    assert read_config({"HOME": "/home/me", "XDG_CACHE_HOME": "/var/me"}).cache == "/var/me/hetcoll"
    assert read_config({"HOME": "/home/me", "XDG_CACHE_HOME": "not/absolute"}).cache == "/home/me/.cache/hetcoll"
    assert read_config({"HOME": "/home/me", "HETCOLL_CACHE": "/fast/disk"}).cache == "/fast/disk"
    assert read_config({"HOME": "/home/me", "HETCOLL_CACHE": "None"}).cache is None
    assert read_config({}).cache is None


def test_it_needs_no_launcher() -> None:
    """A job that starts its ranks itself may leave what launchers set half there."""
    env = {name: value for name, value in os.environ.items() if name != "RANK"} | {"WORLD_SIZE": "2"}
    words = [sys.executable, "-c", "from hetcoll.vendors.devices.kernels.cache import kept; kept()"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr

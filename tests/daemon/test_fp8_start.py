"""A daemon that packs pages as fp8 has loaded what does it before it is READY, and says which."""

from __future__ import annotations

from pathlib import Path

import kvtier


def started(make_daemon, base: Path):
    device = base / "nvme"
    return make_daemon(
        f"nvme.paths={device}", "nvme.bytes=64MiB", "nvme.codec=fp8", fresh=True
    ).start()


def warnings_of(daemon) -> str:
    with kvtier.connect(daemon.url, deadline=10) as kv:
        return " ".join(kv.status().warnings)


def loaded(daemon) -> set[str]:
    """Which of these libraries the process has mapped."""
    maps = Path(f"/proc/{daemon.pid}/maps").read_text()
    return {name for name in ("llvmlite", "libtorch") if name in maps}


def test_numba_is_loaded_and_torch_is_not(make_daemon, base):
    daemon = started(make_daemon, base)
    assert loaded(daemon) == {"llvmlite"}
    assert "numba" not in warnings_of(daemon)
    assert "fp8.fallback" not in daemon.log


def test_without_numba_log_and_status_say_that_torch_packs(
    make_daemon, base, tmp_path, monkeypatch
):
    hidden = tmp_path / "numba"
    hidden.mkdir()
    (hidden / "__init__.py").write_text("raise ImportError('hidden by a test')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    daemon = started(make_daemon, base)
    assert loaded(daemon) == {"libtorch"}
    assert daemon.log.count("event=fp8.fallback") == 1
    assert "hidden by a test" in daemon.log
    assert "pip install 'kvtier[fast]'" in warnings_of(daemon)

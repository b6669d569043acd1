"""What workers import from, and where a Ray of our own keeps its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from dfbench.cluster import pool, session
from dfbench.errors import ClusterError


def test_workers_do_not_import_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = pool._job_config()
    config._py_driver_sys_path.extend(["/elsewhere", str(Path.cwd())])
    assert list(config._py_driver_sys_path) == ["/elsewhere"]


def test_a_folder_that_ray_cannot_use_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "file"))
    with pytest.raises(ClusterError, match=f"its folder {tmp_path}/file/ray .*set TMPDIR"):
        pool.connect("local")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "new"))
    session.require_room()
    assert list((tmp_path / "new" / "ray").iterdir()) == []


def test_a_session_goes_with_the_links_to_it_and_no_others(tmp_path: Path) -> None:
    for name in ("session_1", "session_2"):
        (tmp_path / name / "logs").mkdir(parents=True)
        (tmp_path / f"metrics_{name}").symlink_to(tmp_path / name / "metrics.json")
    (tmp_path / "session_latest").symlink_to("session_1")
    session.remove(tmp_path / "session_1")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["metrics_session_2", "session_2"]
    session.remove(tmp_path / "session_1")

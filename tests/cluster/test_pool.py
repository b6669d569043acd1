"""What workers import from."""

from __future__ import annotations

from pathlib import Path

import pytest

from dfbench.cluster import pool


def test_workers_do_not_import_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = pool._job_config()
    config._py_driver_sys_path.extend(["/elsewhere", str(Path.cwd())])
    assert list(config._py_driver_sys_path) == ["/elsewhere"]

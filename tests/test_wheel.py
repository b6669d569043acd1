"""What is installed is what is in the tree, and it runs from a folder that holds decoys of our folder names."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"cluster": "dfbench/cluster", "workers": "dfbench/workers", "drafters": "dfbench/drafters"}
FOLDERS["analysis"] = "dfbench/analysis"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tracked tree, so that the checkout stays clean."""
    source = tmp_path_factory.mktemp("source")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, tracked.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return next(out.glob("*.whl"))


def tree() -> set[str]:
    """The package files of the checkout, under the names they have when installed."""
    names = {f"dfbench/{path.name}" for path in (ROOT / "cluster" / "_root").iterdir() if path.is_file()}
    for folder, package in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            inside = path.relative_to(ROOT / folder)
            if path.is_file() and inside.parts[0] != "_root" and "__pycache__" not in inside.parts:
                names.add(f"{package}/{inside.as_posix()}")
    return names


def test_the_wheel_holds_the_tree_and_nothing_else(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == tree()


def test_it_runs_beside_decoys(wheel: Path, tmp_path: Path) -> None:
    """Ray puts the current folder on every worker's path: folders named like ours must not be taken for ours."""
    site, here = tmp_path / "site", tmp_path / "here"
    zipfile.ZipFile(wheel).extractall(site)
    for folder in [*FOLDERS, "dfbench"]:
        (here / folder).mkdir(parents=True)
        (here / folder / "decoy.py").write_text("raise RuntimeError('the decoy was imported')")
        if folder != "dfbench":
            (here / folder / "__init__.py").write_text("raise RuntimeError('the decoy was imported')")
    program = (
        "import dfbench, dfbench.cluster.cli, dfbench.analysis\n"
        "from dfbench.drafters.registry import create\n"
        "from dfbench.workers.loop import decode\n"
        "from dfbench.workers.target import ScriptedTarget, scripted_rule\n"
        "trace = decode(ScriptedTarget(scripted_rule({})), create('ar', {}), [1], max_new_tokens=5)\n"
        "print(dfbench.__file__, len(trace.output))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=here, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(site / "dfbench" / "__init__.py"), "5"]

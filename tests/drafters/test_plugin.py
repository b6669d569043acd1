"""Drafters from other packages: found through their entry point, named in errors, run like our own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[1] / "plugin_example"

SCRIPT = """
import json
from dfbench.drafters import registry
from dfbench.errors import OptionError
from dfbench.workers.loop import decode
from dfbench.workers.target import ScriptedTarget

def steps(drafter):
    target = ScriptedTarget(lambda prefix: 3 + len(prefix) % 16, vocab_size=32)
    trace = decode(target, drafter, list(range(3, 19)), max_new_tokens=41)
    return trace.output, len(trace.steps)

errors = []
for name, options in (("echo", {"perod": 3}), ("ecco", {}), ("broken", {}), ("foreign", {})):
    try:
        registry.create(name, options)
    except OptionError as error:
        errors.append(str(error))
plain, ours = steps(registry.create("ar", {})), steps(registry.create("echo", {}))
print(json.dumps({
    "names": registry.names(),
    "source": [registry.source("echo").distribution, registry.source("echo").version],
    "options": registry.parse_options("echo", {"draft_len": 2}).model_dump(),
    "same": plain[0] == ours[0],
    "steps": [plain[1], ours[1]],
    "errors": errors,
}))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example package as pip lays it out, and a distribution whose entry points cannot be used."""
    target = tmp_path_factory.mktemp("site")
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    shutil.copy(EXAMPLE / "dfbench_echo.py", target)
    info = target / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    broken = target / "broken-0.1.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 0.1\n")
    (broken / "entry_points.txt").write_text(
        "[dfbench.drafters]\nbroken = no_such_module:Thing\nforeign = json:JSONDecoder\n"
    )
    return target


def test_a_drafter_from_another_package_runs(site: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["names"][-3:] == ["broken", "echo", "foreign"]
    assert seen["names"][0] == "ar"
    assert seen["source"] == ["dfbench-echo", "1.2.3"]
    assert seen["options"] == {"period": 16, "draft_len": 2}
    assert seen["same"]
    assert seen["steps"] == [40, 8]
    option, name, broken, foreign = seen["errors"]
    assert "did you mean 'period'" in option
    assert "did you mean 'echo'" in name
    assert "cannot be imported" in broken
    assert "is not a dfbench.drafters.base.Drafter class" in foreign

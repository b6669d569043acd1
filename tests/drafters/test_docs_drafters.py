"""docs/drafters.md: its option tables are the registry's, and its example drafter runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from dfbench.drafters import registry
from dfbench.drafters.base import Drafter, DrafterContext
from dfbench.workers.loop import decode
from dfbench.workers.target import ScriptedTarget

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "drafters.md").read_text(encoding="utf-8")


def section(name: str) -> str:
    found = re.search(rf"^### {re.escape(name)}\n(.*?)(?=^##)", DOCS, re.MULTILINE | re.DOTALL)
    assert found, f"docs/drafters.md has no section '### {name}'"
    return found[1]


def shown(value: Any) -> str:
    return json.dumps(value.model_dump() if isinstance(value, BaseModel) else value)


@pytest.mark.parametrize("name", list(registry.BUILT_IN))
def test_options_and_defaults_are_the_registrys(name: str) -> None:
    cls = registry.find(name)
    rows = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", section(name), re.MULTILINE))
    fields = cls.Options.model_fields.items()
    assert rows == {key: shown(info.get_default(call_default_factory=True)) for key, info in fields}
    for preset in cls.presets:
        assert f"`{preset}`" in section(name)


def test_the_example_drafter_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", DOCS, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    namespace: dict[str, Any] = {"__name__": "example"}
    exec(compile(blocks[0], "docs/drafters.md", "exec"), namespace)
    cls = namespace["Skip"]
    assert issubclass(cls, Drafter)
    drafter = cls(cls.Options(), DrafterContext(vocab_size=32))
    prompt = [3 + i % 9 for i in range(20)]
    target = ScriptedTarget(lambda prefix: 3 + len(prefix) % 9, vocab_size=32)
    trace = decode(target, drafter, prompt, max_new_tokens=41)
    assert trace.output == [3 + i % 9 for i in range(20, 61)]
    assert len(trace.steps) == 8

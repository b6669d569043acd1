"""No false alarm: sound engines on tiny models, every engine, both dtypes, chains and trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("engine", "kv_repair", "attention"),
    [("cached", "compact", "sdpa"), ("cached", "refeed", "eager"), ("recompute", "compact", "sdpa")],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def test_a_sound_engine_has_no_finding(
    lab: Callable[..., Any], family: str, engine: str, kv_repair: str, attention: str, dtype: torch.dtype
) -> None:
    made = lab(family=family, engine=engine, kv_repair=kv_repair, attention=attention, dtype=dtype)
    made.run()
    made.examine()
    verdict = made.verdict()
    assert [f"{finding.check}: {finding.message}" for finding in verdict.findings] == []
    assert verdict.total("pairs_compared") == 12
    assert verdict.total("scored") == 12
    if dtype == torch.float64:
        assert verdict.total("tokens_identical") == verdict.total("tokens_compared") > 200

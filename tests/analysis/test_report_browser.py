"""The report in a real browser: what a model wrote does not run, the page fits a phone."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from pages import HOSTILE, Page, hostile_run
from runmaker import RunMaker

from dfbench.analysis import open_run, report

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip
MEASURE = "<script>document.documentElement.lang = document.documentElement.scrollWidth + '/' + innerWidth</script>"


@pytest.fixture
def load(tmp_path: Path) -> Callable[[str], str]:
    """Loads a page as a phone would and gives back what became of it."""

    def dom(content: str) -> str:
        file = tmp_path / "page.html"
        file.write_text(content, encoding="utf-8")
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        done = subprocess.run(
            [str(CHROMIUM), *FLAGS, profile, "--window-size=390,800", "--dump-dom", file.as_uri()],
            capture_output=True, text=True, timeout=150, check=True,
        )  # fmt: skip
        return done.stdout

    return dom


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of a run whose every name and output is hostile."""
    con = open_run(hostile_run(RunMaker(tmp_path_factory.mktemp("hostile") / "run")).write(sweep=HOSTILE))
    return report.page(con, decode=lambda ids: HOSTILE * len(ids), notes=[HOSTILE])


def title(dom: str) -> str:
    found = re.search("<title>(.*?)</title>", dom, re.DOTALL)
    return found[1] if found else ""


def test_what_a_model_wrote_does_not_run(load: Callable[[str], str], page: str) -> None:
    """By escaping alone, without the page's policy; and the page does not scroll sideways on a phone."""
    bare = page.replace(report.POLICY, "default-src * 'unsafe-inline'")
    assert bare != page
    dom = load(bare.replace("</body>", f"{MEASURE}</body>"))
    assert title(dom) != "pwned" and "dfbench report" in title(dom)
    parsed = Page(dom)
    assert len(parsed.all("script")) == 1 and not parsed.all("img")
    wide, window = map(int, (parsed.all("html")[0]["lang"] or "").split("/"))
    assert wide <= window


def test_the_pages_policy_stops_what_escaping_would_miss(load: Callable[[str], str], page: str) -> None:
    dom = load(page.replace("</body>", f"{HOSTILE}</body>"))
    assert "<img" in dom and title(dom) != "pwned"


def test_the_same_text_does_run_where_it_is_not_escaped(load: Callable[[str], str]) -> None:
    """Else the tests above could not fail."""
    assert title(load(f"<!doctype html><title>safe</title><body>{HOSTILE}</body>")) == "pwned"

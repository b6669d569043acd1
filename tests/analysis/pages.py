"""Made runs for the report's tests, and a reader of the pages that it makes."""

from __future__ import annotations

from html.parser import HTMLParser

import numpy as np
from runmaker import Facts, RunMaker

from dfbench.workers.target import Evidence

HOSTILE = "<script>document.title='pwned'</script>\"'><img src=x onerror=document.title='pwned'>&amp;]]>"
"""A name or output that runs, in one way or another, wherever it is not escaped."""
ARMS = ("ar", "pld", "cacheback")
VOID = {"meta", "br", "link", "img"}


def timed_run(run: RunMaker, *, workloads: tuple[str, ...] = ("code", "chat"), prompts: int = 5) -> RunMaker:
    """AR and two arms: one step a token against drafts of one and two tokens, passes a tenth dearer when wider."""
    for workload in workloads:
        for number in range(prompts):
            output, size, prompt = range(100, 113), 1 + 0.1 * number, f"p{number}"
            run.job(workload, prompt, "ar", output, [1] * 12, [size] * 12, draft_ms=0.01)
            run.job(workload, prompt, "pld", output, [2] * 6, [size * 1.1] * 6, arm_order=1, draft_ms=0.02)
            run.job(workload, prompt, "cacheback", output, [3] * 4, [size * 1.2] * 4, arm_order=2, draft_ms=0.03)
    return run


def diverging_run(run: RunMaker) -> RunMaker:
    """One prompt whose arm parts from AR at position 2, where AR's logits tie."""

    run.job("code", "p0", "ar", AR_IDS, [1] * 3, evidence=logits(AR_IDS, 22, 0.0))
    run.job("code", "p0", "pld", SPEC_IDS, [1] * 3, evidence=logits(SPEC_IDS, 12, 0.0625))
    return run


AR_IDS, SPEC_IDS = [10, 11, 12, 13], [10, 11, 22, 23]


def logits(ids: list[int], second: int, gap: float) -> Evidence:
    """Top-two logits of four tokens; at position 2 the second is `second`, `gap` below."""
    top = np.full(4, 9.0, np.float32)
    below = np.array([8.0, 8.0, 9.0 - gap, 8.0], np.float32)
    return Evidence(np.array(ids), top, np.array([5, 5, second, 5]), below, np.ones(4, np.int32))


def hostile_run(run: RunMaker) -> RunMaker:
    """A run whose every name would run as a script, were it not escaped."""
    run.facts = Facts(device=HOSTILE, model=HOSTILE, stack=HOSTILE, worker_id=HOSTILE)
    timed = {"costs": [1.0] * 3}
    for number in range(3):
        run.job(HOSTILE, f"{HOSTILE}{number}", "ar", [10, 11, 12, 13], [1] * 3, **timed)
        run.job(HOSTILE, f"{HOSTILE}{number}", HOSTILE, [10, 11, 22 + number, 23], [1] * 3, **timed, drafter="pld")
    run.workers[HOSTILE] = {"device": HOSTILE, HOSTILE: HOSTILE}
    return run


PARTS = (
    ("chain", {"draft": "chain"}, 2, 2),
    ("tree", {"draft": "tree"}, 4, 6),
    ("full", {"draft": "tree", "frozen": "f"}, 8, 6),
)


def with_parts(run: RunMaker, prompts: int = 3) -> RunMaker:
    """Arms of one drafter in the order of the plan; the number of tokens and of queries a pass."""
    for number in range(prompts):
        run.job("code", f"p{number}", "ar", range(9), [1] * 8, [1.0] * 8)
        for arm, options, emits, queries in PARTS:
            passes = 8 // emits
            run.job("code", f"p{number}", arm, range(9), [emits] * passes, [1.0 + 0.01 * number] * passes,
                    drafter="cacheback", queries=[queries] * passes, params=options)  # fmt: skip
    return run


class Page(HTMLParser):
    """A page taken apart: its elements, its text, and what is in which element."""

    def __init__(self, content: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(content)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """Attributes of every element of a kind."""
        return [attributes for name, attributes in self.elements if name == tag]

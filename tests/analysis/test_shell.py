"""The prompt of `dfbench sql`, on a terminal of its own."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
from pathlib import Path

from dfbench.cluster import cli

STORED = Path(__file__).parent / "data" / "schema-1"
ENTER, UP, CONTROL_C, CONTROL_D = "\r", "\x1b[A", "\x03", "\x04"
PATIENCE_S = 120.0


class Terminal:
    """A person at the prompt: types, and reads until something is there."""

    def __init__(self, state: Path) -> None:
        self.side, theirs = pty.openpty()
        command = [sys.executable, "-c", f"from {cli.__name__} import main; main()", "sql", str(STORED)]
        wanted = {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "XDG_STATE_HOME": str(state), "COLUMNS": "100"}
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | wanted, start_new_session=True
        )
        os.close(theirs)
        self.waiting = select.poll()
        self.waiting.register(self.side, select.POLLIN)
        self.seen = ""

    def until(self, text: str) -> str:
        """What came up to and with `text`."""
        while text not in self.seen:
            assert self.waiting.poll(PATIENCE_S * 1000), f"no {text!r} in {self.seen!r}"
            self.seen += os.read(self.side, 4096).decode(errors="replace")
        before, self.seen = self.seen.split(text, 1)
        return before + text

    def type(self, text: str) -> None:
        os.write(self.side, text.encode())

    def answers(self, typed: str, *awaited: str) -> None:
        """Type, see each of these, and be asked again."""
        self.type(typed)
        for text in (*awaited, "dfbench>"):
            self.until(text)

    def begins(self, typed: str) -> None:
        """Type a line that is only the beginning of a query."""
        self.type(typed)
        self.until("...>")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.side)


def test_a_session_at_the_prompt(tmp_path: Path) -> None:
    """Views, columns, a mistake, two lines, a remark, a view by its name, Ctrl-C, history, the end of input."""
    terminal = Terminal(tmp_path)
    try:
        terminal.until("dfbench>")
        terminal.answers(".views" + ENTER, "speedup_le_mat: one cell")
        terminal.answers(".schema matt" + ENTER, "did you mean 'mat'?")
        terminal.answers("select oops from nowhere" + ENTER, "there is no view 'nowhere'")
        terminal.begins("select 40 +" + ENTER)
        terminal.answers("2 as answer" + ENTER, "42")
        terminal.begins("-- a remark" + ENTER)
        terminal.answers("select 50 + 5 as answer" + ENTER, "55")
        terminal.begins("select mat from" + ENTER)
        terminal.answers(ENTER, "does not parse")
        terminal.answers("plan" + ENTER, "(2 rows)")
        terminal.answers("never mind" + CONTROL_C)
        terminal.answers(UP + ENTER, "(2 rows)")
        terminal.type(CONTROL_D)
        assert terminal.process.wait(PATIENCE_S) == 0
    finally:
        terminal.close()
    kept = (tmp_path / "dfbench" / "sql_history").read_text(encoding="utf-8")
    assert "never mind" not in kept
    assert "+select oops from nowhere\n" in kept and "+select 40 +\n+2 as answer\n" in kept

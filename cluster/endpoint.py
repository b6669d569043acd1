"""`dfbench record`: ask an OpenAI-compatible server every prompt of a workload, greedily, and keep what it answers.

The log has one JSON line an answer, {"workload", "prompt_id", "request", "response"}, which `dfbench replay` reads.
A key comes from the environment and goes into one header; it is in no file, message or log, and no redirect gets it.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

from dfbench.cluster.workloads import Row, turn_id
from dfbench.errors import DfbenchError, UsageError, WorkloadError

RETRIES = 5
LONGEST_WAIT_S = 60.0
AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)
"""HTTP statuses after which the same request may succeed."""


class EndpointError(DfbenchError):
    """The server refused a request, or did not answer."""


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible server. `url` is its base, such as http://localhost:8000/v1; `model` None = its first."""

    url: str
    model: str | None = None
    key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0
    pause_s: float = 1.0

    def __post_init__(self) -> None:
        wrong = "--endpoint must be the server's base URL, such as http://localhost:8000/v1."
        try:
            parts = urllib.parse.urlsplit(self.url)
            _ = parts.port  # Looked at here: a port beyond 65535 would be taken for another one.
        except ValueError as error:
            raise UsageError(wrong) from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(wrong)
        if parts.username or parts.password or parts.query or parts.fragment:
            raise UsageError("--endpoint must hold no user name, password or query: put the key into the environment.")

    @property
    def base(self) -> str:
        """The URL that paths are added to."""
        return self.url.rstrip("/").removesuffix("/chat/completions").removesuffix("/completions")

    def model_name(self) -> str:
        """The model to ask: the one that was named, else the first that the server lists."""
        if self.model is not None:
            return self.model
        listed = self.call("/models", None).get("data")
        if not listed or not isinstance(listed[0], dict) or "id" not in listed[0]:
            raise UsageError(f"{self.base} lists no model: name one with --model.")
        return str(listed[0]["id"])

    def call(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """One request, repeated while the server is busy. Raises EndpointError without the key in its message."""
        for attempt in range(RETRIES):
            try:
                return self._once(path, body)
            except urllib.error.HTTPError as error:
                message = self._hide(f"{error.code} {error.reason}: {error.read(500).decode('utf-8', 'replace')}")
                pause = _retry_after(error) or self.pause_s * 2**attempt
                final = error.code not in AGAIN
            except (OSError, HTTPException) as error:
                message, pause, final = self._hide(_no_answer(error)), self.pause_s * 2**attempt, False
            if final or attempt == RETRIES - 1:
                raise EndpointError(f"{self.base}{path}: {message.strip()}")
            time.sleep(min(pause, LONGEST_WAIT_S))
        raise EndpointError(f"{self.base}{path}: no answer.")

    def _once(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, headers)
        with _OPENER.open(request, timeout=self.timeout_s) as response:
            text = response.read()
        try:
            answer = json.loads(text)
        except ValueError as error:
            raise EndpointError(
                f"{self.base}{path}: the answer is not JSON, is this an OpenAI-compatible server?"
            ) from error
        if not isinstance(answer, dict):
            raise EndpointError(f"{self.base}{path}: the answer is not a JSON object.")
        return answer

    def _hide(self, text: str) -> str:
        return text.replace(self.key, "***") if self.key else text


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the key to whoever it names."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


def _no_answer(error: Exception) -> str:
    """Why nothing came back, in words, after all tries."""
    reason = getattr(error, "reason", error)
    said = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
    return f"no answer after {RETRIES} tries ({said}): start the server, or name another --endpoint."


def _retry_after(error: urllib.error.HTTPError) -> float | None:
    value = error.headers.get("Retry-After", "") if error.headers else ""
    return float(value) if value.isdecimal() else None


def key_from(variable: str) -> str | None:
    """The key in an environment variable; None where it is not set. Raises UsageError for one with line breaks."""
    key = os.environ.get(variable, "").strip()
    if any(c.isspace() for c in key):
        raise UsageError(f"the key in ${variable} holds white space: set it to the key alone.")
    return key or None


@dataclass(frozen=True)
class RecordOptions:
    """How to ask. `extra` is added to every request, such as {"return_token_ids": true} for vLLM."""

    max_tokens: int = 256
    concurrency: int = 1
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Recorded:
    """What a recording came to; `failures` name prompts and why."""

    answers: int = 0
    skipped: int = 0
    failures: list[str] = field(default_factory=list)


def record(
    rows: Sequence[Row],
    workload: str,
    endpoint: Endpoint,
    out: Path,
    options: RecordOptions,
    on_answer: Callable[[Recorded], None] = lambda recorded: None,
) -> Recorded:
    """Ask every prompt that `out` does not hold yet and append the answers as they come.

    A conversation's turns follow one another, each with the server's own earlier answers. A prompt that fails is
    named and the others go on.
    """
    done = _done(out)
    recorded = Recorded()
    model = endpoint.model_name()
    with out.open("a", encoding="utf-8") as log, ThreadPoolExecutor(options.concurrency) as pool:

        def ask(row: Row) -> Iterator[dict[str, Any]]:
            return iter(list(converse(row, workload, endpoint, model, options)))

        waiting: dict[Future[Iterator[dict[str, Any]]], Row] = {}
        todo = iter([row for row in rows if (workload, _last_turn(row)) not in done])
        recorded.skipped = len(rows) - sum((workload, _last_turn(row)) not in done for row in rows)
        while True:
            for row in todo:
                waiting[pool.submit(ask, row)] = row
                if len(waiting) >= options.concurrency:
                    break
            if not waiting:
                return recorded
            finished, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in finished:
                _keep(future, waiting.pop(future), done, log, recorded)
                on_answer(recorded)


def _keep(future: Future[Any], row: Row, done: set[tuple[str, str]], log: Any, recorded: Recorded) -> None:
    try:
        answers = list(future.result())
    except EndpointError as error:
        recorded.failures.append(f"{row.prompt_id}: {error}")
        return
    for answer in answers:
        if (answer["workload"], answer["prompt_id"]) not in done:
            log.write(json.dumps(answer, ensure_ascii=False) + "\n")
            recorded.answers += 1
    log.flush()


def _last_turn(row: Row) -> str:
    return turn_id(row.prompt_id, len(row.followups))


def converse(
    row: Row, workload: str, endpoint: Endpoint, model: str, options: RecordOptions
) -> Iterator[dict[str, Any]]:
    """The log lines of one prompt, one a turn."""
    asked: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": options.max_tokens, **options.extra}
    if not row.messages and not row.text:
        raise WorkloadError(f"prompt '{row.prompt_id}' is token ids: a server is asked in text.")
    if not row.messages:
        request = {**asked, "prompt": row.text}
        yield _line(workload, row.prompt_id, request, endpoint.call("/completions", request))
        return
    messages = [dict(message) for message in row.messages]
    for turn, following in enumerate([*row.followups, None]):
        request = {**asked, "messages": list(messages)}
        response = endpoint.call("/chat/completions", request)
        yield _line(workload, turn_id(row.prompt_id, turn), request, response)
        if following is not None:
            messages += [{"role": "assistant", "content": _content(response)}, {"role": "user", "content": following}]


def _line(workload: str, prompt_id: str, request: dict[str, Any], response: dict[str, Any]) -> dict[str, Any]:
    return {"workload": workload, "prompt_id": prompt_id, "request": request, "response": response}


def _content(response: dict[str, Any]) -> str:
    try:
        return str(response["choices"][0]["message"]["content"] or "")
    except (KeyError, IndexError, TypeError) as error:
        raise EndpointError("the answer has no message, so the conversation cannot go on.") from error


def _done(out: Path) -> set[tuple[str, str]]:
    """Which answers a log holds already; an unfinished last line, which a crash left, is cut off."""
    if not out.exists():
        return set()
    whole = 0
    found: set[tuple[str, str]] = set()
    with out.open("rb") as log:
        for number, line in enumerate(log, start=1):
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            found.add(_identity(line, out, number))
    if whole < out.stat().st_size:
        os.truncate(out, whole)
    return found


def _identity(line: bytes, out: Path, number: int) -> tuple[str, str]:
    try:
        row = json.loads(line)
        return row["workload"], row["prompt_id"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{out}, line {number} is not a recorded answer: name another --out file.") from error


def rows_of(rows: Iterable[Row], prompts: int | None) -> list[Row]:
    """The first `prompts` rows; all without a number."""
    listed = list(rows)
    return listed if prompts is None else listed[:prompts]

"""`record` against a small server of this test's own, on loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dfbench.cluster.cli import app
from dfbench.cluster.endpoint import Endpoint, EndpointError, RecordOptions, key_from, record
from dfbench.cluster.sources import LogSource, SourceOptions
from dfbench.cluster.workloads import Row
from dfbench.errors import UsageError, WorkloadError

KEY = "sk-very-secret-123"


class Server(ThreadingHTTPServer):
    """Answers with the last message reversed; `script` overrides statuses, `seen` is what was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[tuple[str, dict[str, Any] | None, dict[str, str]]] = []
        self.script: list[tuple[int, dict[str, str], str]] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._serve(None)

    def do_POST(self) -> None:
        self._serve(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _serve(self, body: dict[str, Any] | None) -> None:
        with self.server.lock:
            self.server.seen.append((self.path, body, dict(self.headers)))
            scripted = self.server.script.pop(0) if self.server.script else None
        if scripted is not None:
            return self._send(*scripted)
        if body is None:
            return self._send(200, {}, json.dumps({"data": [{"id": "served-model"}]}))
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        if "messages" in body:
            text = body["messages"][-1]["content"][::-1]
            choice["message"] = {"role": "assistant", "content": text}
        else:
            text = choice["text"] = body["prompt"][::-1]
        answer: dict[str, Any] = {"object": "x", "choices": [choice]}
        if body.get("return_token_ids"):
            answer["prompt_token_ids"], choice["token_ids"] = [1, 2], [ord(c) for c in text]
        return self._send(200, {}, json.dumps(answer))

    def _send(self, status: int, headers: dict[str, str], text: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def endpoint(server: Server, **given: Any) -> Endpoint:
    return Endpoint(server.url, **{"pause_s": 0.001, **given})


def ask(text: str, name: str, *followups: str) -> Row:
    return Row(name, "test", messages=({"role": "user", "content": text},), followups=followups)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_prompt_is_asked_greedily_and_kept(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "log.jsonl"
    rows = [ask("abc", "a"), Row("b", "test", text="xyz")]
    done = record(rows, "w", endpoint(server), out, RecordOptions(max_tokens=9))
    assert (done.answers, done.skipped, done.failures) == (2, 0, [])
    asked = [(path, body) for path, body, _ in server.seen if body]
    common = {"model": "served-model", "temperature": 0, "max_tokens": 9}
    assert asked == [
        ("/v1/chat/completions", {**common, "messages": [{"role": "user", "content": "abc"}]}),
        ("/v1/completions", {**common, "prompt": "xyz"}),
    ]
    first = lines(out)[0]
    assert (first["workload"], first["prompt_id"]) == ("w", "a")
    assert first["response"]["choices"][0]["message"]["content"] == "cba"


def test_the_log_can_be_replayed_exactly_where_the_server_gives_ids(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "log.jsonl"
    options = RecordOptions(extra={"return_token_ids": True})
    record([ask("abc", "a")], "w", endpoint(server, model="m"), out, options)
    source = LogSource(out, SourceOptions())
    recording = next(iter(source))
    assert (recording.workload, recording.prompt_id) == ("w", "a")
    assert recording.output_ids == [ord(c) for c in "cba"]
    assert not source.summary.estimate


def test_a_conversation_holds_the_server_s_own_answers(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "log.jsonl"
    record([ask("ab", "t", "cd", "ef")], "w", endpoint(server), out, RecordOptions())
    assert [row["prompt_id"] for row in lines(out)] == ["t", "t#2", "t#3"]
    said = [m["content"] for m in lines(out)[2]["request"]["messages"]]
    assert said == ["ab", "ba", "cd", "dc", "ef"]


def test_what_is_there_is_not_asked_again(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "log.jsonl"
    rows = [ask(c * 3, c) for c in "abcd"]
    record(rows[:2], "w", endpoint(server), out, RecordOptions())
    with out.open("a") as log:
        log.write('{"workload": "w", "prompt_id": "c", "requ')
    server.seen.clear()
    done = record(rows, "w", endpoint(server, model="m"), out, RecordOptions(concurrency=3))
    assert (done.answers, done.skipped) == (2, 2)
    assert len(server.seen) == 2
    assert sorted(row["prompt_id"] for row in lines(out)) == ["a", "b", "c", "d"]


def test_a_busy_server_is_asked_again(server: Server, tmp_path: Path) -> None:
    server.script = [(503, {}, "busy"), (429, {"Retry-After": "0"}, "slow down")]
    done = record([ask("ab", "a")], "w", endpoint(server, model="m"), tmp_path / "l", RecordOptions())
    assert done.answers == 1 and len(server.seen) == 3


def test_a_refused_prompt_is_named_and_the_others_go_on(server: Server, tmp_path: Path) -> None:
    server.script = [(400, {}, '{"error": "too long"}')]
    done = record([ask("ab", "a"), ask("cd", "b")], "w", endpoint(server, model="m"), tmp_path / "l", RecordOptions())
    assert done.answers == 1
    assert done.failures == [f'a: {server.url}/chat/completions: 400 Bad Request: {{"error": "too long"}}']


def test_a_redirect_is_not_followed(server: Server) -> None:
    server.script = [(302, {"Location": server.url + "/elsewhere"}, "")]
    with pytest.raises(EndpointError, match="302"):
        endpoint(server, key=KEY).call("/models", None)
    assert len(server.seen) == 1


def test_no_server_is_an_error_in_words() -> None:
    with pytest.raises(EndpointError, match=r"127\.0\.0\.1:1/v1/models: no answer after 5 tries \(.*refused\)"):
        Endpoint("http://127.0.0.1:1/v1", pause_s=0.001).model_name()


def test_an_answer_that_is_not_json(server: Server) -> None:
    server.script = [(200, {}, "<html>"), (200, {}, "[]"), (200, {}, "{}")]
    for message in ("not JSON", "not a JSON object"):
        with pytest.raises(EndpointError, match=message):
            endpoint(server).call("/models", None)
    with pytest.raises(UsageError, match="lists no model"):
        endpoint(server).model_name()


def test_the_key_goes_into_one_header_and_nowhere_else(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "prompt": "abc"}\n{"id": "b", "prompt": "abd"}\n')
    server.script = [(200, {}, json.dumps({"data": [{"id": "m"}]})), (401, {}, f"bad key {KEY}")]
    out = tmp_path / "log.jsonl"
    arguments = ["record", "--endpoint", server.url, "--workload", f"w={prompts}", "--out", str(out)]
    result = CliRunner().invoke(app, ["-v", *arguments, "--key-env", "MY_KEY"])
    assert result.exit_code == 1 and "failed: w a" in result.output and "***" in result.output
    assert all(headers["Authorization"] == f"Bearer {KEY}" for _, _, headers in server.seen)
    everything = result.output + caplog.text + "".join(f.read_text() for f in tmp_path.iterdir())
    assert KEY not in everything and KEY not in repr(endpoint(server, key=KEY))
    assert [row["prompt_id"] for row in lines(out)] == ["b"]


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://h/v1", "http://", "http://u:p@h/v1", "http://h/v1?key=1"])
def test_bad_urls(url: str) -> None:
    with pytest.raises(UsageError, match="--endpoint must") as caught:
        Endpoint(url)
    assert "u:p" not in str(caught.value) and "key=1" not in str(caught.value)


def test_bad_logs_keys_and_prompts(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "log.jsonl"
    out.write_text("hello\n")
    with pytest.raises(UsageError, match=r"line 1 is not a recorded answer"):
        record([ask("a", "a")], "w", endpoint(server), out, RecordOptions())
    with pytest.raises(WorkloadError, match="asked in text"):
        record([Row("a", "t", prompt_ids=(1,))], "w", endpoint(server), tmp_path / "l", RecordOptions())
    monkeypatch.setenv("MY_KEY", "two words")
    with pytest.raises(UsageError, match="white space"):
        key_from("MY_KEY")
    monkeypatch.delenv("MY_KEY")
    assert key_from("MY_KEY") is None

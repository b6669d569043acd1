"""Bundles, and what the head is told to run; Ray's job server is a stand-in here."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from fakehead import FakeHead
from runkit import make_run

from dfbench.cluster import bundle, headjobs, processes, remote, sweep_file
from dfbench.cluster.ledger import Ledger
from dfbench.cluster.plan import arm_key
from dfbench.cluster.remote import SubmitOptions
from dfbench.cluster.replay import parse_arms
from dfbench.cluster.sources_files import find_files, readable
from dfbench.errors import ClusterError, SweepError
from dfbench.workers.shipped import named

SWEEP = """\
name: mine
target: recorded
workloads: [{name: w, file: FILE}]
arms: [ar, pld]
"""


@pytest.fixture
def sweep(tmp_path: Path) -> Callable[..., Any]:
    """A sweep over one file of rows, which may be called anything."""

    def make(name: str = "rows.jsonl", folder: str = "a", rows: int = 2) -> Any:
        (tmp_path / folder).mkdir(exist_ok=True)
        row = {"workload": "w", "prompt_id": "p", "prompt_ids": [1], "output_ids": [2, 3]}
        (tmp_path / folder / name).write_text(
            "".join(json.dumps({**row, "prompt_id": f"p{i}"}) + "\n" for i in range(rows))
        )
        path = tmp_path / folder / "sweep.yaml"
        path.write_text(SWEEP.replace("FILE", json.dumps(name)))
        return sweep_file.load(str(path))

    return make


def packed(sweep: Any, folder: Path) -> str:
    folder.mkdir()
    return bundle.pack(sweep, folder)


def test_a_bundle_is_a_sweep_that_loads_elsewhere(sweep: Callable[..., Any], tmp_path: Path) -> None:
    packed(sweep(), tmp_path / "out")
    again = sweep_file.load(str(tmp_path / "out" / "sweep.yaml"))
    (workload,) = again.workloads
    assert Path(workload.file).parent == tmp_path / "out" / "files"
    assert Path(workload.file).read_bytes() == (tmp_path / "a" / "rows.jsonl").read_bytes()
    assert [arm.name for arm in again.arms] == ["ar", "pld"]


def test_the_same_content_is_the_same_bundle_wherever_it_lies(sweep: Callable[..., Any], tmp_path: Path) -> None:
    first = packed(sweep(), tmp_path / "1")
    assert packed(sweep(folder="b"), tmp_path / "2") == first
    assert packed(sweep(folder="c", rows=3), tmp_path / "3") != first


@pytest.mark.parametrize("name", ["..sneaky.jsonl", "a b;rm -rf.jsonl", "ünïcode.jsonl", "x" * 200 + ".jsonl"])
def test_file_names_lead_nowhere(sweep: Callable[..., Any], tmp_path: Path, name: str) -> None:
    packed(sweep(name=name), tmp_path / "out")
    (copy,) = (tmp_path / "out" / "files").iterdir()
    assert set(copy.name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
    assert copy.name[0] != "." and len(copy.name) < 100


@pytest.mark.parametrize(
    "arm",
    [
        "{name: f, drafter: cacheback, frozen: table.bin}",
        "{name: f, drafter: hybrid, wide: {drafter: cacheback, options: {frozen: table.bin}}}",
    ],
    ids=["its own", "of a drafter inside"],
)
def test_files_of_drafters_are_pinned_and_travel_too(tmp_path: Path, arm: str) -> None:
    table = tmp_path / "table.bin"
    table.write_bytes(b"a table")
    path = tmp_path / "s.yaml"
    path.write_text(f"name: t\ntarget: scripted\nworkloads: [w]\narms: [ar, {arm}]\n")
    sweep = sweep_file.load(str(path))
    (shipped,) = named([arm.spec() for arm in sweep.arms])
    assert shipped == (hashlib.sha256(b"a table").hexdigest(), table)
    packed(sweep, tmp_path / "out")
    (copy,) = (tmp_path / "out" / "files").iterdir()
    assert copy.read_bytes() == b"a table"
    assert str(table) not in (tmp_path / "out" / "sweep.yaml").read_text()
    elsewhere = sweep_file.load(str(tmp_path / "out" / "sweep.yaml"))
    keys = [arm_key(one, one.arms[1], frozenset()) for one in (sweep, elsewhere)]
    assert keys[0] == keys[1]  # a file is its content, wherever it lies
    assert list(named([arm.spec() for arm in elsewhere.arms])) == [(shipped[0], copy)]


def test_a_file_that_is_gone_is_one_sentence(sweep: Callable[..., Any], tmp_path: Path) -> None:
    gone = sweep()
    (tmp_path / "a" / "rows.jsonl").unlink()
    with pytest.raises(SweepError, match="cannot be sent to the head: No such file"):
        packed(gone, tmp_path / "out")


def test_a_bundle_has_a_limit(sweep: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "LIMIT", 100)
    with pytest.raises(ClusterError, match="copy them to the head and give the command there"):
        packed(sweep(), tmp_path / "out")


def test_a_replay_travels_with_all_that_it_reads(tmp_path: Path) -> None:
    (tmp_path / "my logs").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / "my logs" / name).write_text(f"{name}\n")
    for name in ("table.bin", "curve.json"):
        (tmp_path / name).write_text(name)
    arms = parse_arms([_written(tmp_path / "arms.yaml", f"- {{drafter: cacheback, frozen: {tmp_path}/table.bin}}\n")])
    sources = {"source": tmp_path / "my logs", "curve": tmp_path / "curve.json"}
    name, there = bundle.pack_replay(arms, sources, _made(tmp_path / "1"))
    home = _made(tmp_path / "home")
    _made(home / bundle.PLACE)
    (tmp_path / "1").rename(home / bundle.PLACE / name)  # as the head keeps it
    assert [file.read_text() for file in sorted((home / there["source"]).iterdir())] == ["a.jsonl\n", "b.jsonl\n"]
    assert (home / there["curve"]).read_text() == "curve.json"
    (arm,) = yaml.safe_load((home / there["arms"]).read_text())
    assert (home / arm["frozen"]).read_text() == "table.bin"
    assert bundle.pack_replay(arms, sources, _made(tmp_path / "2"))[0] == name
    assert bundle.pack_replay(arms, {"source": tmp_path / "curve.json"}, _made(tmp_path / "3"))[0] != name


def test_a_run_travels_as_its_ledger_stands(tmp_path: Path) -> None:
    make_run(tmp_path / "r", 2).close()
    (tmp_path / "r" / "log").mkdir()
    (tmp_path / "r" / "log" / "driver.jsonl").write_text("{}\n")
    with Ledger.open(tmp_path / "r") as held:  # a driver at work, whose last words are not in the file itself yet
        held.set_meta("said", "now")
        _, there = bundle.pack_replay([], {"source": tmp_path / "r"}, _made(tmp_path / "out"))
    copy = tmp_path / "out" / Path(there["source"]).relative_to(Path(there["source"]).parents[1])
    assert sorted(path.name for path in copy.iterdir()) == ["ledger.db", "prompts.parquet"]
    with Ledger.open(copy, readonly=True) as ledger:
        assert ledger.meta("said") == "now"


def test_a_folder_of_logs_travels_as_a_replay_here_reads_it(tmp_path: Path) -> None:
    logs = _made(tmp_path / "logs")
    for name in ("venv", "__pycache__", ".git", "two\nlines", "c:back\\slash"):
        _made(logs / name)
        (logs / name / "a.jsonl").write_text("{}\n")
    (logs / ".gitignore").write_text("*\n")
    (logs / "beyond").symlink_to(tmp_path)
    (logs / "nowhere").symlink_to("/nowhere")
    os.mkfifo(logs / "pipe")
    with suppress(OSError):  # some file systems refuse such names
        (logs / os.fsdecode(b"odd\xff.jsonl")).write_text("{}\n")
    bundle.pack_replay([], {"source": logs}, _made(tmp_path / "out"))
    file = headjobs.archive(tmp_path / "out", tmp_path)
    with zipfile.ZipFile(file) as sent, sent.open("upload.tar") as packed, tarfile.open(fileobj=packed) as inside:
        names = sorted(inside.getnames())
    expected = [f"source/logs/{readable(found.relative_to(logs))}" for found in find_files(logs)]
    assert names == sorted(["arms.yaml", *expected]) and len(expected) >= 3
    before = file.read_bytes()
    os.utime(tmp_path / "out" / "arms.yaml", (0, 0))  # before any date that a zip file can hold
    assert headjobs.archive(tmp_path / "out", tmp_path).read_bytes() == before


def test_what_is_no_file_and_no_folder_or_empty_is_not_sent(tmp_path: Path) -> None:
    _made(tmp_path / "empty")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty" / ".hidden").touch()
    for name, said in (("pipe", "is a pipe or a device"), ("empty", "holds no recorded answers: it is empty")):
        with pytest.raises(SweepError, match=said):
            bundle.pack_replay([], {"source": tmp_path / name}, _made(tmp_path / f"out-{name}"))


def test_a_run_whose_files_are_merged_meanwhile_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "r", 2).close()
    copy, failures = shutil.copyfile, iter([FileNotFoundError(2, "No such file or directory", "jobs-1")])

    def vanishing(source: Path, target: Path) -> object:
        for failure in failures:
            raise failure
        return copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", vanishing)
    bundle.pack_replay([], {"source": tmp_path / "r"}, _made(tmp_path / "out"))
    assert (tmp_path / "out" / "source" / "r" / "prompts.parquet").is_file()
    failures = iter([FileNotFoundError(2, "No such file or directory", "jobs-1")] * 3)
    with pytest.raises(SweepError, match="jobs-1 cannot be sent to the head: No such file"):
        bundle.pack_replay([], {"source": tmp_path / "r"}, _made(tmp_path / "again"))


def _written(file: Path, text: str) -> str:
    file.write_text(text)
    return str(file)


# --- Ray Jobs --------------------------------------------------------------------------------------------------------


class Jobs:
    """A job server that runs entrypoints in a shell at once, with a `dfbench` on its PATH that we wrote.

    `running`: it says that they are not over. `asked` is called for every question.
    """

    def __init__(self, home: Path, dfbench: str) -> None:
        self.home, self.jobs = home, {}
        self.entrypoints: list[str] = []
        self.headers: list[Any] = []
        self.stopped: list[str] = []
        self.running = False
        self.asked: Callable[[], object] = lambda: None
        (home / "bin").mkdir(parents=True)
        (home / "bin" / "dfbench").write_text(f"#!/bin/sh\n{dfbench}\n")
        (home / "bin" / "dfbench").chmod(0o755)

    def __call__(self, address: str, headers: Any) -> Jobs:
        self.headers.append(headers)
        return self

    def submit_job(self, *, entrypoint: str, submission_id: str, runtime_env: dict[str, str] | None) -> str:
        folder = self.home
        if runtime_env:
            folder = self.home / "unpacked" / submission_id
            folder.mkdir(parents=True)
            with zipfile.ZipFile(runtime_env["working_dir"]) as sent:
                sent.extractall(folder)
        environment = {
            "PATH": f"{self.home / 'bin'}:{os.environ['PATH']}",
            "DFBENCH_HOME": str(self.home / "dfbench"),
            "RAY_JOB_CONFIG_JSON_ENV_VAR": "{}",
        }
        done = subprocess.run(
            ["/bin/sh", "-c", entrypoint], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        log = f"INFO setting up\n{done.stdout}Running entrypoint for job {submission_id}: {entrypoint}\n{done.stderr}"
        self.entrypoints.append(entrypoint)
        self.jobs[submission_id] = (done.returncode, log, entrypoint)
        return submission_id

    def _do_request(self) -> None:
        raise NotImplementedError("what would be sent")

    def stop_job(self, job: str) -> None:
        self.stopped.append(job)

    def get_job_info(self, job: str) -> Any:
        self.asked()
        code, _, entrypoint = self.jobs[job]
        ended = "SUCCEEDED" if code == 0 else "FAILED"
        status = SimpleNamespace(is_terminal=lambda: not self.running, value="RUNNING" if self.running else ended)
        return SimpleNamespace(
            status=status, driver_exit_code=code, message="", submission_id=job, entrypoint=entrypoint
        )

    def get_job_logs(self, job: str) -> str:
        return self.jobs[job][1]


@pytest.fixture
def server(fake_head: FakeHead, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Jobs]:
    """A job server behind the stand-in head; the script is its `dfbench`."""
    import ray.job_submission

    fake_head.keys[(b"dashboard", b"dashboard")] = b"10.0.0.1:8265"
    monkeypatch.setattr(headjobs, "_POLL_S", (0.01, 0.01))
    monkeypatch.setattr(processes, "raylets", lambda head, labelled=False: iter(()))

    def make(dfbench: str) -> Jobs:
        jobs = Jobs(tmp_path / "head", dfbench)
        monkeypatch.setattr(ray.job_submission, "JobSubmissionClient", jobs)
        return jobs

    return make


def test_a_sweep_is_kept_on_the_head_and_submitted_there(
    sweep: Callable[..., Any], server: Callable[[str], Jobs], fake_head: FakeHead, tmp_path: Path
) -> None:
    jobs = server('pwd; echo "$@"; ls "$(dirname "$2")"; env | grep RAY_JOB_CONFIG || echo no job env')
    lines: list[str] = []
    options = SubmitOptions(run="runs/x", new=True)
    assert remote.submit(sweep(), fake_head.address, options, lines.append) == 0
    name = bundle.pack(sweep(), _made(tmp_path / "again"))
    assert lines[0] == str(tmp_path / "head" / "dfbench")
    assert lines[1] == f"submit uploads/{name}/sweep.yaml --address auto --run runs/x --new"
    assert lines[2:4] == ["files", "sweep.yaml"]
    assert lines[4] == "no job env"
    assert all(headers == {"Authorization": "Bearer secret"} for headers in jobs.headers)
    assert "secret" not in "".join(jobs.entrypoints)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_sending_it_again_keeps_the_first_upload(
    sweep: Callable[..., Any], server: Callable[[str], Jobs], fake_head: FakeHead, tmp_path: Path
) -> None:
    server("true")
    for _ in range(2):
        assert remote.submit(sweep(), fake_head.address, SubmitOptions(), lambda _: None) == 0
    assert len(list((tmp_path / "head" / "dfbench" / "uploads").iterdir())) == 1


def test_of_two_that_send_the_same_at_once_both_go_on(
    sweep: Callable[..., Any], server: Callable[[str], Jobs], fake_head: FakeHead, tmp_path: Path
) -> None:
    jobs = server("echo here")
    # The other one's upload comes in between: after this one saw that there was none.
    (jobs.home / "bin" / "tar").write_text('#!/bin/sh\n/bin/tar "$@"\ncp -r "$4" "${4%.*}"\n')
    (jobs.home / "bin" / "tar").chmod(0o755)
    lines: list[str] = []
    assert remote.submit(sweep(), fake_head.address, SubmitOptions(), lines.append) == 0
    assert lines[0] == "here"
    assert len(list((tmp_path / "head" / "dfbench" / "uploads").iterdir())) == 1


def test_a_head_that_has_no_room_for_the_upload_says_so(
    sweep: Callable[..., Any], server: Callable[[str], Jobs], fake_head: FakeHead
) -> None:
    jobs = server("echo here")
    (jobs.home / "bin" / "tar").write_text("#!/bin/sh\necho tar: No space left on device >&2\nexit 1\n")
    (jobs.home / "bin" / "tar").chmod(0o755)
    with pytest.raises(ClusterError, match="could not keep what was sent: tar: No space left on device"):
        remote.submit(sweep(), fake_head.address, SubmitOptions(), lambda _: None)


def test_a_plan_that_is_only_shown_leaves_no_run_to_ask_for(
    sweep: Callable[..., Any], server: Callable[[str], Jobs], fake_head: FakeHead
) -> None:
    server("echo 4 jobs")
    lines: list[str] = []
    assert remote.submit(sweep(), fake_head.address, SubmitOptions(dry_run=True), lines.append) == 0
    assert lines == ["4 jobs"]


def test_the_heads_exit_status_and_words_are_ours(server: Callable[[str], Jobs], fake_head: FakeHead) -> None:
    server("echo out; echo 'dfbench: no such run.' >&2; exit 2")
    lines: list[str] = []
    assert remote.command(["status", "nope"], fake_head.address, lines.append) == 2
    assert lines == ["out", "dfbench: no such run."]


def test_detached_says_how_to_come_back(
    sweep: Callable[..., Any], server: Callable[[str], Jobs], fake_head: FakeHead
) -> None:
    server("echo mine: 4 jobs").running = True
    lines: list[str] = []
    assert remote.submit(sweep(), fake_head.address, SubmitOptions(), lines.append, detach=True) == 0
    assert lines[0] == "mine: 4 jobs"
    assert any("dfbench status --address" in line for line in lines)


def test_detached_says_when_the_head_has_not_said_where_the_run_is(
    sweep: Callable[..., Any], server: Callable[[str], Jobs], fake_head: FakeHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headjobs, "_BEGINS_WITHIN_S", 0.05)
    server("true").running = True
    lines: list[str] = []
    assert remote.submit(sweep(), fake_head.address, SubmitOptions(), lines.append, detach=True) == 0
    assert lines[0].startswith("the head has not said yet where the run is")
    assert any("dfbench status --address" in line for line in lines)


def test_detached_a_request_that_is_refused_is_not_left_unsaid(
    sweep: Callable[..., Any], server: Callable[[str], Jobs], fake_head: FakeHead
) -> None:
    server("echo 'dfbench: no such model.' >&2; exit 2")
    lines: list[str] = []
    assert remote.submit(sweep(), fake_head.address, SubmitOptions(), lines.append, detach=True) == 2
    assert lines == ["dfbench: no such model."]


def interrupt() -> None:
    raise KeyboardInterrupt


def test_ctrl_c_leaves_a_sweep_alone_and_ends_what_only_looks(
    sweep: Callable[..., Any], server: Callable[[str], Jobs], fake_head: FakeHead
) -> None:
    jobs = server("true")
    jobs.asked = interrupt
    lines: list[str] = []
    assert remote.submit(sweep(), fake_head.address, SubmitOptions(), lines.append) == 130
    retry = ["retry", "--address", fake_head.address]
    assert remote.forward(retry, fake_head.address, lines.append, drives=True) == 130
    assert len(lines) == 2 and all("the sweep goes on" in line for line in lines)
    assert jobs.stopped == []
    with pytest.raises(KeyboardInterrupt):
        remote.command(["status", "--watch"], fake_head.address, lines.append)
    assert [job.startswith("dfbench-status-") for job in jobs.stopped] == [True]


def test_a_job_that_only_looks_ends_with_who_reads_it(server: Callable[[str], Jobs], fake_head: FakeHead) -> None:
    """As under `dfbench status --watch --address HEAD | head -1`."""

    def gone(_: str) -> None:
        raise BrokenPipeError

    jobs = server("echo a line")
    with pytest.raises(BrokenPipeError):
        remote.command(["status", "--watch"], fake_head.address, gone)
    assert len(jobs.stopped) == 1


def test_a_head_that_no_longer_answers_is_one_sentence(
    server: Callable[[str], Jobs], fake_head: FakeHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = server("true")

    def refuse() -> None:
        raise ConnectionError("refused")

    jobs.asked = refuse
    monkeypatch.setattr(headjobs, "_ANSWERS_WITHIN_S", 0.05)
    with pytest.raises(ClusterError, match="has not answered for 0 s: if it is up, it goes on"):
        remote.command(["status"], fake_head.address, lambda _: None)
    # A cut that is mended in time is not even noticed.
    monkeypatch.setattr(headjobs, "_ANSWERS_WITHIN_S", 60.0)
    answers = iter([refuse, refuse, lambda: None])
    jobs.asked = lambda: next(answers)()
    assert remote.command(["status"], fake_head.address, lambda _: None) == 0


def test_a_head_without_dfbench_is_one_sentence(
    server: Callable[[str], Jobs], fake_head: FakeHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = server("true")
    (jobs.home / "bin" / "dfbench").unlink()
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with pytest.raises(ClusterError, match="finds no `dfbench`: install it there"):
        remote.command(["status"], fake_head.address, lambda _: None)


@pytest.mark.parametrize(
    ("argv", "there"),
    [
        (["status", "--address", "h:1", "r"], ["status", "r"]),
        (["sql", "--address=h:1", "select 'a b' from jobs; --"], ["sql", "select 'a b' from jobs; --"]),
        (["retry", "r", "--kind", "oom", "--address", "h:1"], ["retry", "r", "--kind", "oom", "--address", "auto"]),
    ],
)
def test_a_command_line_is_forwarded_word_by_word(
    server: Callable[[str], Jobs], fake_head: FakeHead, argv: list[str], there: list[str]
) -> None:
    server('for word in "$@"; do echo "$word"; done')
    lines: list[str] = []
    drives = argv[0] == "retry"
    assert remote.forward(argv, fake_head.address, lines.append, drives=drives) == 0
    assert lines[: len(there)] == there
    assert len(lines) == len(there) + drives  # which leaves a run to ask for


@pytest.mark.parametrize(
    "command",
    [
        *(["status"], ["cancel"], ["retry"], ["sql", "from cells"], ["report"], ["guard"], ["verify"], ["compact"]),
        *(["compare", "a", "b"],),
    ],
    ids=lambda command: command[0],
)
def test_an_address_means_the_heads_run_wherever_it_is_given(
    server: Callable[[str], Jobs],
    fake_head: FakeHead,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dfbench: Callable[..., Any],
    command: list[str],
) -> None:
    """On a node too, and where a run lies here."""
    server('echo "there: $*"')
    make_run(tmp_path / "runs" / "mine", 1).close()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(processes, "raylets", lambda head, labelled=False: iter([(None, fake_head.address)]))
    said = dfbench(*command, "--address", fake_head.address)
    drives = " --address auto" if command[0] in ("retry", "guard") else ""
    assert said.code == 0 and said.out.startswith(f"there: {' '.join(command)}{drives}\n"), said
    local = dfbench(*command, "--address", "local")
    assert "there: " not in local.out and not (local.code == 2 and "head" in local.err), local


def test_files_are_not_written_on_another_machine_unasked(dfbench: Callable[..., Any]) -> None:
    for words in (["sql", "from cells", "--out", "f"], ["report", "--html", "f"], ["report", "--charts", "d"]):
        said = dfbench(*words, "--address", "10.0.0.1")
        assert said.code == 2 and f"is text: leave out {words[-2]}." in said.err


def test_a_replay_is_sent_and_what_the_head_has_is_named(
    server: Callable[[str], Jobs], fake_head: FakeHead, tmp_path: Path
) -> None:
    server('for word in "$@"; do echo "$word"; done; cat "$2"')
    (tmp_path / "traces.jsonl").write_text("the traces\n")
    lines: list[str] = []
    arms, options = parse_arms(["pld"]), ["--new"]
    assert remote.replay(tmp_path / "traces.jsonl", arms, "example", options, fake_head.address, lines.append) == 0
    place = lines[1].removesuffix("/source/traces.jsonl")
    assert lines[:-1] == [
        *["replay", f"{place}/source/traces.jsonl", "--arms", f"{place}/arms.yaml", "--address", "auto", "--new"],
        *["--verify-cost", "example", "the traces"],
    ]
    lines.clear()
    remote.replay(Path("runs/there"), arms, None, [], fake_head.address, lines.append)
    assert lines[1] == "runs/there"


def test_a_name_from_the_command_line_is_no_shell_code(
    server: Callable[[str], Jobs], fake_head: FakeHead, tmp_path: Path
) -> None:
    server("true")
    remote.command(["status", f"$(touch {tmp_path}/owned); touch {tmp_path}/owned"], fake_head.address, lambda _: None)
    assert not (tmp_path / "owned").exists()


def test_the_head_drives_only_for_strangers(fake_head: FakeHead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "raylets", lambda head, labelled=False: iter(()))
    assert remote.needed(fake_head.address)
    port = fake_head.address.rpartition(":")[2]
    monkeypatch.setattr(
        processes, "raylets", lambda head, labelled=False: iter([] if head else [(None, f"10.0.0.1:{port}")])
    )
    assert not remote.needed(fake_head.address)
    assert not remote.needed("auto")
    assert not remote.needed("local")


def test_detaching_needs_a_cluster(sweep: Callable[..., Any]) -> None:
    with pytest.raises(ClusterError, match="name its head with --address"):
        remote.submit(sweep(), "local", SubmitOptions(), lambda _: None, detach=True)


def test_another_dfbench_on_the_head_is_refused(sweep: Callable[..., Any], fake_head: FakeHead) -> None:
    fake_head.keys[(b"dashboard", b"dashboard")] = b"10.0.0.1:8265"
    fake_head.nodes[0].labels["dfbench/dfbench"] = "9.9.9"
    with pytest.raises(ClusterError, match=r"here and 9\.9\.9 on the head: install"):
        remote.submit(sweep(), fake_head.address, SubmitOptions(), lambda _: None)


def test_a_head_without_a_dashboard_takes_no_jobs(sweep: Callable[..., Any], fake_head: FakeHead) -> None:
    with pytest.raises(ClusterError, match="takes no jobs"):
        remote.submit(sweep(), fake_head.address, SubmitOptions(), lambda _: None)


def test_a_dashboard_out_of_reach_is_one_sentence(sweep: Callable[..., Any], fake_head: FakeHead) -> None:
    fake_head.keys[(b"dashboard", b"dashboard")] = b"127.0.0.1:1"
    with pytest.raises(ClusterError, match=r"dashboard at 127\.0\.0\.1:1 cannot be reached from here"):
        remote.submit(sweep(), fake_head.address, SubmitOptions(), lambda _: None)

"""Bad requests: one sentence that says what to write instead, exit status 2, nothing written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
Make = Callable[..., Path]

GOOD = "{name: s, target: scripted, workloads: [{name: w, prompts: 2}], arms: [ar, pld]}"


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    folder = tmp_path / "desk"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def refused(run: Run, desk: Path, *arguments: object) -> str:
    """The one sentence with which this is refused; the folder is as it was."""
    before = snapshot(desk)
    result = run(*arguments)
    assert result.code == 2, (result.code, result.out, result.err)
    assert snapshot(desk) == before, "something was written"
    lines = result.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("dfbench: "), result.err
    assert "Traceback" not in result.err
    return lines[0]


def snapshot(folder: Path) -> dict[str, bytes]:
    """Everything below a folder, but for the files in which SQLite keeps its readers."""
    found = sorted(path for path in folder.rglob("*") if not path.name.endswith(("-wal", "-shm")))
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in found}


SWEEPS = [
    ("- ar\n", "must be a mapping"),
    ("name: [x", "is not YAML"),
    ("", "is empty"),
    (GOOD.replace("arms:", "arm:"), "unknown key 'arm': did you mean 'arms'?"),
    (GOOD.replace("prompts: 2", "prompts: two"), "`workloads[0].prompts` must be a whole number, not 'two'"),
    (GOOD.replace("prompts: 2", "prompts: 0"), "`workloads[0].prompts` must be at least 1, not 0"),
    (GOOD.replace("[ar, pld]", "[ar, ar]"), "two arms are called 'ar'"),
    (GOOD.replace("pld", "pdl"), "unknown drafter 'pdl': did you mean 'pld'?"),
    (GOOD.replace("pld", "{name: pld, draftlen: 3}"), "unknown option 'draftlen': did you mean 'draft_len'?"),
    (GOOD.replace("pld", "{name: pld, draft_len: ten}"), "option 'draft_len'"),
    (GOOD.replace("target: scripted, ", "").replace("name: w,", "name: cde,"), "unknown workload 'cde'"),
    ("[" * 5000, "is nested too deeply"),
    (GOOD.replace("{name: s,", "{name: s, scripted: {step_ms: .inf},"), "`scripted.step_ms` must be a finite number"),
    (GOOD.replace("{name: s,", "{name: s, scripted: {prompt_tokens: 2000000},"), "must be at most 1000000"),
    (GOOD.replace("{name: s,", "{name: s, repeats: 100000000,"), "jobs, more than the"),
    (GOOD.replace("name: s,", "name: ../../etc,"), "`name` must be a name of letters"),
    (
        GOOD.replace("name: s,", "name: 2026-13-45,"),
        "line 1: '2026-13-45' is not a value of its type; quote what is text",
    ),
    (GOOD.replace("prompts: 2", "prompts: !!bool maybe"), "'maybe' is not a value of its type"),
    (GOOD.replace("prompts: 2", "prompts: " + "9" * 5000), "is not a value of its type"),
    (
        GOOD.replace("name: s,", "name: 0x" + "f" * 5000 + ","),
        "must be text (put it in quotes), not a number of thousands",
    ),
    (GOOD.replace("name: s,", "name: s, warmup: 1000000000,"), "`warmup` must be at most 1000"),
    (GOOD.replace("name: s,", "name: s, max_new_tokens: 100000000000000000000,"), "must be at most 2147483647"),
    (GOOD.replace("name: s,", 'name: s, notes: ["\\ud800"],'), "holds a value that cannot be written down again"),
    (GOOD.replace("target: scripted,", "model: {options: &o {quantization: *o}},"), "cannot be written down again"),
    (GOOD.replace("name: s,", "name: s, model: {options: {lean: true}},"), "`model.options` are for a model"),
    (GOOD.replace("pld", "{name: pld, preset: [hf]}"), "unknown preset '['hf']'"),
    (GOOD.replace("pld", "{name: pld, draft_len: true}"), "option 'draft_len' must be a number, not True"),
    (GOOD.replace("pld", "{name: pld, draft_len: '3'}"), "option 'draft_len' must be a number, not '3'"),
    (GOOD.replace("pld", "{name: pld, full: 1}"), "option 'full' must be true or false, not 1"),
    (GOOD.replace("pld", "{name: pld, draft_len: 1" + "0" * 30 + "}"), "not one of more than 18 digits"),
    (GOOD.replace("pld", "{drafter: hybrid, long: {drafter: pld, options: [1]}}"), "`options` must be a mapping"),
    (
        GOOD.replace("pld", "{drafter: hybrid, acceptance: {a.b.c.d.e.f: [1, 2]}}"),
        "write what HybridDrafter.acceptance()",
    ),
]


@pytest.mark.parametrize(("text", "message"), SWEEPS, ids=[message[:40] for _, message in SWEEPS])
def test_sweep_files(dfbench: Run, desk: Path, text: str, message: str) -> None:
    (desk / "s.yaml").write_text(text)
    assert message in refused(dfbench, desk, "submit", "s.yaml")


def test_a_sweep_that_is_not_there(dfbench: Run, desk: Path) -> None:
    assert "did you mean 'quick'; a sweep is a YAML file or one of" in refused(dfbench, desk, "submit", "qick")
    assert "is a folder" in refused(dfbench, desk, "submit", desk)


def test_anchors_and_merged_mappings(dfbench: Run, desk: Path) -> None:
    (desk / "s.yaml").write_text(GOOD.replace("pld", "&p {name: pld, max_ngram: 2}, {<<: *p, drafter: pld, name: q}"))
    assert "arms ar, pld, q" in dfbench("submit", "s.yaml", "--dry-run").out


MODEL_OPTIONS = [
    ("threads: many", "'threads' is 'many': write a number"),
    ("threads: 0", "'threads' is 0: write 1 or more"),
    ("allow_pickle: maybe", "'allow_pickle' is 'maybe': write true or false"),
    ("quantization: int8", "'quantization' is 'int8': write a mapping"),
]


@pytest.mark.parametrize(("option", "message"), MODEL_OPTIONS)
def test_options_of_a_model(dfbench: Run, desk: Path, option: str, message: str) -> None:
    (desk / "s.yaml").write_text(f"{{name: s, workloads: [code], arms: [ar], model: {{options: {{{option}}}}}}}")
    assert message in refused(dfbench, desk, "submit", "s.yaml", "--dry-run")


def test_overrides_of_a_sweep_that_is_wrong_itself(dfbench: Run, desk: Path) -> None:
    (desk / "s.yaml").write_text("{name: s, target: scripted, workloads: [5, {name: w}], arms: [1]}")
    assert "unknown member 'x'" in refused(dfbench, desk, "submit", "s.yaml", "--set", "arms.x=1")
    assert "`workloads[0]` must be a mapping" in refused(dfbench, desk, "submit", "s.yaml", "--workload", "w=f.jsonl")


FILES_OF_DRAFTERS = [
    ("cacheback", "frozen", b"dfbench frozen table 1\n" + b"[" * 100_000, "is truncated or damaged"),
    ("ngram-cache", "static", b"dfbench bigrams 2\n" + b"[" * 100_000, "is truncated or damaged"),
    ("hybrid", "cost_file", b"[" * 100_000, "is not a cost curve"),
    ("hybrid", "cost_file", b'{"queries": [1, Infinity], "relative": [1, 2]}', "is not a cost curve"),
    ("hybrid", "cost_file", b'{"queries": [1, 1%s], "relative": [1, 2]}' % (b"0" * 400), "queries of 1 or more"),
]


@pytest.mark.parametrize(("drafter", "option", "content", "message"), FILES_OF_DRAFTERS)
def test_files_of_drafters(dfbench: Run, desk: Path, drafter: str, option: str, content: bytes, message: str) -> None:
    (desk / "f").write_bytes(content)
    (desk / "s.yaml").write_text(GOOD.replace("pld", f"{{drafter: {drafter}, {option}: f}}"))
    assert message in refused(dfbench, desk, "submit", "s.yaml")


def test_command_line_overrides(dfbench: Run, desk: Path) -> None:
    (desk / "s.yaml").write_text(GOOD)
    for arguments, message in [
        (("--set", "max_new_tokens"), "has no '='"),
        (("--set", "max_new_tokens=many"), "`max_new_tokens` must be a whole number"),
        (("--set", "arms.pdl.draft_len=3"), "did you mean 'pld'"),
        (("--set", "name=2026-13-45"), "'2026-13-45' is not a value of its type"),
        (("--set", "model={id: a, id: b}"), "the key 'id' is there twice"),
        (("--set", "arms.².draft_len=3"), "unknown member '²'"),
        (("--workload", "w"), "must be NAME=FILE"),
        (("--workload", "v=f.jsonl"), "unknown workload of the sweep 'v'"),
    ]:
        assert message in refused(dfbench, desk, "submit", "s.yaml", *arguments)


def test_mistyped_commands_and_options(dfbench: Run, desk: Path) -> None:
    for arguments in (("sumbit", "quick"), ("submit",), ("submit", "quick", "--dryrun"), ("submit", "quick", "--run")):
        result = dfbench(*arguments)
        assert result.code == 2 and "Traceback" not in result.err and not list(desk.iterdir())


@pytest.fixture
def model_sweep(desk: Path, tiny_model: Make) -> Path:
    """A sweep on a tiny model of 64 positions, whose workload `w` is the file w.jsonl."""
    text = f"{{name: s, model: {tiny_model()}, workloads: [{{name: w, file: w.jsonl}}], arms: [ar], warmup: 0,"
    (desk / "s.yaml").write_text(text + " max_new_tokens: 8}")
    return desk / "w.jsonl"


ROWS = [
    ("", "w.jsonl is empty"),
    ("prompt: hello\n", "line 1 is not JSON"),
    ('{"prompt": "w5", "n": ' + "9" * 5000 + "}", "line 1 is not JSON"),
    ('{"prompt": "w5"}\n{"promt": "w6"}\n', "line 2 has neither `prompt` nor `messages`"),
    ('{"prompt": "w5"}\n\n{"prompt": ""}\n', "line 3: `prompt` must be text that is not empty"),
    (json.dumps({"prompt": "w5 " * 60}), "60 prompt tokens and up to 8 new ones exceed the model's context of 64"),
]


@pytest.mark.parametrize(("text", "message"), ROWS, ids=[message[:30] for _, message in ROWS])
def test_workload_files(dfbench: Run, desk: Path, model_sweep: Path, text: str, message: str) -> None:
    model_sweep.write_text(text)
    assert message in refused(dfbench, desk, "submit", "s.yaml")


def test_a_workload_file_that_is_missing_or_binary(dfbench: Run, desk: Path, model_sweep: Path) -> None:
    assert "does not exist" in refused(dfbench, desk, "submit", "s.yaml")
    model_sweep.write_bytes(bytes(range(256)))
    assert "is not UTF-8 text" in refused(dfbench, desk, "submit", "s.yaml")


def test_too_few_prompts(dfbench: Run, desk: Path, model_sweep: Path) -> None:
    model_sweep.write_text('{"prompt": "w5"}\n')
    assert "add prompts, or write `warmup: 0`" in refused(dfbench, desk, "submit", "s.yaml", "--set", "warmup=1")
    assert "write `prompts: 1` or fewer" in refused(dfbench, desk, "submit", "s.yaml", "--set", "workloads.w.prompts=2")


def test_models(dfbench: Run, desk: Path, model_sweep: Path, tiny_model: Make) -> None:
    model_sweep.write_text('{"messages": [{"role": "user", "content": "w5"}]}\n')
    (desk / "empty").mkdir()
    bare = tiny_model("bare", template=None)
    for model, message in [
        ("./missing", "there is no model at './missing'"),
        ("./empty", "'./empty' is not a model that can be loaded"),
        (bare, "has no chat template"),
        ("no-such-name", "there is no model at 'no-such-name'"),
    ]:
        assert message in refused(dfbench, desk, "submit", "s.yaml", "--model", model)
    assert "must be one of" in refused(dfbench, desk, "submit", "s.yaml", "--set", "model.dtype=bf16")


def test_run_directories(dfbench: Run, desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dfbench.cluster import plan, runs, sweep_file

    (desk / "s.yaml").write_text(GOOD)
    (desk / "full").mkdir()
    (desk / "full" / "thesis.tex").write_text("x")
    (desk / "file").write_text("x")
    assert "is not empty and holds no run" in refused(dfbench, desk, "submit", "s.yaml", "--run", "full")
    assert "is not a directory" in refused(dfbench, desk, "submit", "s.yaml", "--run", "file")

    runs.create(desk / "other", plan.plan(sweep_file.load("s.yaml", ["max_new_tokens=7"])))
    said = refused(dfbench, desk, "submit", "s.yaml", "--run", "other")
    assert "other holds a run of another sweep ('s', or other settings" in said
    assert "already holds a run" in refused(
        dfbench, desk, "submit", "s.yaml", "--set", "max_new_tokens=7", "--run", "other", "--new"
    )


def test_a_run_directory_on_a_network_file_system(dfbench: Run, desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dfbench.cluster import run_place

    (desk / "s.yaml").write_text(GOOD)
    monkeypatch.setattr(run_place, "file_system", lambda *_: "nfs4")
    assert "is on a network file system (nfs4)" in refused(dfbench, desk, "submit", "s.yaml")


def test_a_run_directory_that_cannot_be_written(dfbench: Run, desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (desk / "s.yaml").write_text(GOOD)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "is not writable: write --run with a directory that is" in refused(dfbench, desk, "submit", "s.yaml")


def test_commands_on_a_run_that_is_not_there(dfbench: Run, desk: Path) -> None:
    for command in ("status", "retry", "cancel"):
        assert "there is no run under 'runs/'" in refused(dfbench, desk, command)
        assert "there is no run at 'nowhere'" in refused(dfbench, desk, command, "nowhere")
    (desk / "folder").mkdir()
    assert "is not a run" in refused(dfbench, desk, "status", "folder")


def planned(desk: Path) -> Path:
    """A run that is planned and not begun, in the folder `r`."""
    from dfbench.cluster import plan, runs, sweep_file

    (desk / "s.yaml").write_text(GOOD)
    runs.create(desk / "r", plan.plan(sweep_file.load("s.yaml")))
    return desk / "r"


@pytest.mark.parametrize("content", [b"<html>", bytes(range(256)) * 40, b""], ids=["text", "binary", "empty"])
def test_a_ledger_that_is_none(dfbench: Run, desk: Path, content: bytes) -> None:
    (planned(desk) / "ledger.db").write_bytes(content)
    for command in ("status", "retry", "cancel", "report", "verify", "submit"):
        assert "the ledger of 'r'" in refused(dfbench, desk, command, "r")


@pytest.mark.parametrize(
    "content", ["name: s\nworkloads: [w]\narms:\n", "name: s\narms: [ar]\n", "[1]", "name: 2026-13-45"]
)
def test_a_sweep_of_a_run_that_is_damaged(dfbench: Run, desk: Path, content: str) -> None:
    (planned(desk) / "sweep.yaml").write_text(content)
    assert "sweep.yaml" in refused(dfbench, desk, "submit", "r")


def test_tables_replace_nothing_but_tables(dfbench: Run, desk: Path) -> None:
    run = planned(desk)
    (desk / "a.txt").write_text("some text")
    for kind in ("build", "bigrams"):
        for out, message in (
            ("a.txt", "is no such table"),
            (run / "ledger.db", "is no such table"),
            (run, "is a folder"),
        ):
            assert message in refused(dfbench, desk, "corpus", kind, "a.txt", "--out", out)
    own = run / "prompts.parquet"
    for command in (("calibrate", "--force"), ("workloads", "build", "chat", "--force")):
        assert "is a part of the run" in refused(dfbench, desk, *command, "--out", own)


def test_nodes_in_a_format_that_does_not_exist(dfbench: Run, desk: Path) -> None:
    assert "unknown format 'jsn': did you mean 'json'" in refused(dfbench, desk, "nodes", "--format", "jsn")
    assert "is not the address of a head" in refused(dfbench, desk, "nodes", "--address", "host:²")


LOGS = [
    '{"messages": [{"role": "user", "content": "a"}], "choices": [{"message": {"content": "b"}}], "object": null}',
    '{"prompt_ids": [1], "output_ids": [2], "prompt_id": "\\ud800"}',
    '{"prompt": "a", "completion": "b\\ud800"}',
]


@pytest.mark.parametrize("line", LOGS)
def test_logs_of_which_nothing_can_be_used(dfbench: Run, desk: Path, line: str) -> None:
    (desk / "log.jsonl").write_text(line + "\n")
    assert "can be replayed (1 left out)" in refused(dfbench, desk, "replay", "log.jsonl")


def test_a_ledger_that_lacks_a_table(dfbench: Run, desk: Path) -> None:
    from dfbench.cluster.ledger import Ledger

    with Ledger.open(planned(desk)) as ledger, ledger.transaction() as db:
        db.execute("drop table shards")
    for command in ("status", "retry", "cancel", "submit"):
        assert "the run's ledger cannot be used" in refused(dfbench, desk, command, "r")


def test_a_run_inside_a_run(dfbench: Run, desk: Path) -> None:
    planned(desk)
    for inside in ("r/inner", "r/records/deep/er"):
        assert "is inside the run" in refused(dfbench, desk, "submit", "s.yaml", "--run", inside)


def test_a_run_is_not_overwritten_by_what_is_made_of_it(dfbench: Run, desk: Path) -> None:
    planned(desk)
    for own in ("r/ledger.db", "r/sweep.yaml", "r/prompts.parquet", "r/records/0/x.parquet"):
        assert "is a part of the run" in refused(dfbench, desk, "report", "r", "--html", own)
        result = dfbench("sql", "r", "select 1", "--format", "csv", "--out", own)
        assert result.code == 2 and "is a part of the run" in result.err
    assert dfbench("report", "r", "--html", "r/report.html").code == 0


def test_paths_that_are_too_long(dfbench: Run, desk: Path) -> None:
    for arguments in (("status", "x" * 5000), ("submit", "x" * 5000), ("report", "x" * 300)):
        assert "write a shorter one" in refused(dfbench, desk, *arguments)


def test_a_target_of_export_that_cannot_be_written(dfbench: Run, desk: Path) -> None:
    planned(desk)
    result = dfbench("export", "http://127.0.0.1:9/x", "r")
    assert result.code == 2 and "cannot be written" in result.err


def test_columns_of_one_name_all_appear(dfbench: Run, desk: Path) -> None:
    planned(desk)
    for form, shown in (("csv", "a,a_1,a_2\n1,2,3\n"), ("json", '"a_2": 3'), ("table", "a_1")):
        result = dfbench("sql", "r", "select * from (select 1 a), (select 2 a), (select 3 a)", "--format", form)
        assert result.code == 0 and shown in result.out


def test_a_home_folder_that_is_not_there(dfbench: Run, desk: Path) -> None:
    assert "no such home folder" in refused(dfbench, desk, "submit", "~no-such-user/s.yaml")


def test_ctrl_c_says_how_to_go_on(dfbench: Run, desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dfbench.cluster import plan

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    (desk / "s.yaml").write_text(GOOD)
    monkeypatch.setattr(plan, "plan", interrupted)
    result = dfbench("submit", "s.yaml")
    assert result.code == 130 and "run the same command again" in result.err


def test_closed_streams_are_stood_in_for(desk: Path) -> None:
    """As under `>&-`: no file of ours may get the number of a stream, and Ray wants to have a stderr."""
    code = (
        "import os, sys; from dfbench.cluster import cli_streams; cli_streams.open_streams(); "
        "open('said', 'w').write(f'{sys.stderr.fileno()} {[os.path.realpath(f\"/dev/fd/{n}\") for n in range(3)]}')"
    )
    subprocess.run(["/bin/sh", "-c", f'exec {sys.executable} -c "$0" <&- >&- 2>&-', code], check=True)
    assert (desk / "said").read_text() == f"2 {['/dev/null'] * 3}"


def test_a_reader_that_goes_away_is_no_failure(desk: Path) -> None:
    planned(desk)
    command = "from dfbench.cluster.cli import main; main()"
    query = "select * from range(300000)"
    arguments = [sys.executable, "-c", command, "sql", "r", query, "--format", "csv"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 0 and "Traceback" not in said and "Broken" not in said


GONE = """
import os, sys
from dfbench.cluster import cli, cli_streams, driver
from dfbench.cluster.ledger_schema import Counts

def drive(run_dir, options, on_progress, on_files, on_note):
    on_note("a note")
    os.write(1, b"from a library")
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    cli_streams._outlet(sys.stdout).gone = False
    on_note("a note")
    open("driven", "w").close()
    return driver.Result("done", Counts(0, 0, 0, 0), [])

driver.run = drive
cli.main()
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full here")
def test_a_reader_that_goes_away_ends_no_run(desk: Path) -> None:
    """As under `dfbench submit … | head -1`: nothing that is printed may stop what is driven."""
    (desk / "s.yaml").write_text(GOOD)
    reader, writer = os.pipe()
    os.close(reader)
    arguments = [sys.executable, "-c", GONE, "submit", "s.yaml"]
    done = subprocess.run(arguments, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (desk / "driven").exists() and "Traceback" not in done.stderr, done.stderr
    # The last line found the disk full, when nothing could be lost but itself.
    assert done.returncode == 1 and done.stderr == "dfbench: the system refused: No space left on device.\n"


def test_names_and_addresses_of_record(dfbench: Run, desk: Path) -> None:
    for address, workload, message in [
        ("http://127.0.0.1:9", "a/../b=r.jsonl", "`name` must be a name of letters"),
        ("http://127.0.0.1:9", "", "`name` must be a name of letters"),
        ("http://[::1", "chat", "must be the server's base URL"),
        ("http://127.0.0.1:99999", "chat", "must be the server's base URL"),
    ]:
        arguments = ("record", "--endpoint", address, "--workload", workload, "--out", "o.jsonl")
        assert message in refused(dfbench, desk, *arguments)


def test_cancelling_what_is_over_changes_nothing(dfbench: Run, desk: Path) -> None:
    from dfbench.cluster.ledger import Ledger

    with Ledger.open(planned(desk)) as ledger, ledger.transaction() as db:
        db.execute("update jobs set state = 'done'")
        db.execute("update shards set state = 'done'")
        db.execute("insert or replace into meta values ('state', 'done')")
    assert dfbench("cancel", "r").code == 0
    assert "done, 4 of 4 jobs done" in dfbench("status", "r").out


def test_upkeep_of_a_run_without_whole_records(dfbench: Run, desk: Path) -> None:
    from dfbench.cluster.ledger import Ledger

    run = planned(desk)
    assert dfbench("verify", "r").code == 0
    with Ledger.open(run) as ledger, ledger.transaction() as db:
        db.execute("insert into files values ('records/0/jobs-000001.parquet', 'jobs', 0, 1, 9, 'x', 1)")
    assert dfbench("verify", "r").code == 1
    result = dfbench("compact", "r")
    assert result.code == 2 and "jobs-000001.parquet (missing)" in result.err


def test_a_query_that_is_not_text(dfbench: Run, desk: Path) -> None:
    planned(desk)
    result = dfbench("sql", "r", "select '\udcff'")
    assert result.code == 2 and "is not UTF-8 text" in result.err


def test_retry_of_what_does_not_exist(dfbench: Run, desk: Path) -> None:
    from dfbench.cluster import plan, runs, sweep_file

    (desk / "s.yaml").write_text(GOOD)
    runs.create(desk / "r", plan.plan(sweep_file.load("s.yaml")))
    assert "the run has no shard 'abc'" in refused(dfbench, desk, "retry", "r", "--shard", "abc")
    assert "unknown kind 'oomm': did you mean 'oom'?" in refused(dfbench, desk, "retry", "r", "--kind", "oomm")


def test_with_no_hub_in_reach_everything_that_is_missing_is_named_at_once(
    dfbench: Run, desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no route to the hub")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", refuse)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    said = refused(dfbench, desk, "submit", "qwen3-8b")
    for part in (
        "the model 'Qwen/Qwen3-8B@b968826d",
        "`--model PATH`",
        "the data set 'openai/openai_humaneval@7dce6050",
        "the data set 'abisee/cnn_dailymail@96df5e68",
        "`--workload copyctx=FILE.jsonl`",
    ):
        assert part in said


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("select from from", "dfbench: "),
        ("select * from cels", "cells"),
    ],
)
def test_sql(dfbench: Run, desk: Path, query: str, message: str) -> None:
    from dfbench.cluster import plan, runs, sweep_file

    (desk / "s.yaml").write_text(GOOD)
    runs.create(desk / "r", plan.plan(sweep_file.load("s.yaml")))
    result = dfbench("sql", "r", query)
    assert result.code == 2 and message in result.err and "Traceback" not in result.err

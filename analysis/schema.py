"""The columns that a run's files and ledger have: this side of the contract with the record format.

A file of an older schema lacks some of these columns; they then read as NULL. A file of a newer one has more; they are
left out and the run says so. Types are DuckDB's.
"""

from __future__ import annotations

from collections.abc import Mapping

SCHEMA_VERSION = 2
"""The newest record schema that the views know."""

_IDENTITY = {
    "run_id": "VARCHAR",
    "job_id": "VARCHAR",
    "workload": "VARCHAR",
    "prompt_id": "VARCHAR",
    "arm": "VARCHAR",
    "device": "VARCHAR",
    "attempt": "INTEGER",
    "warmup": "BOOLEAN",
    "pair_only": "BOOLEAN",
}

RECORDS: Mapping[str, Mapping[str, str]] = {
    "jobs": {
        **_IDENTITY,
        "shard_id": "VARCHAR",
        "drafter": "VARCHAR",
        "params": "VARCHAR",
        "cache": "VARCHAR",
        "target": "VARCHAR",
        "engine": "VARCHAR",
        "model": "VARCHAR",
        "revision": "VARCHAR",
        "dtype": "VARCHAR",
        "stack": "VARCHAR",
        "worker_id": "VARCHAR",
        "repeat": "INTEGER",
        "turn": "INTEGER",
        "arm_order": "INTEGER",
        "prompt_tokens": "INTEGER",
        "max_new_tokens": "INTEGER",
        "finish_reason": "VARCHAR",
        "began_at": "TIMESTAMP WITH TIME ZONE",
        "start_ns": "BIGINT",
        "prefill_ns": "BIGINT",
        "decode_ns": "BIGINT",
        "wall_ns": "BIGINT",
        "repetition": "DOUBLE",
        "output_ids": "INTEGER[]",
        "throttled": "BOOLEAN",
        "telemetry": "VARCHAR",
    },
    "steps": {
        **_IDENTITY,
        "step": "INTEGER",
        "position": "INTEGER",
        "queries": "INTEGER",
        "padding": "INTEGER",
        "drafted": "INTEGER",
        "depth": "INTEGER",
        "accepted": "INTEGER",
        "emitted": "INTEGER",
        "step_ns": "BIGINT",
        "draft_ns": "BIGINT",
        "forward_ns": "BIGINT",
        "accept_ns": "BIGINT",
        "commit_ns": "BIGINT",
    },
    "tokens": {
        **_IDENTITY,
        "position": "INTEGER",
        "token_id": "INTEGER",
        "step": "INTEGER",
        "top1_id": "INTEGER",
        "top1_logit": "FLOAT",
        "top2_id": "INTEGER",
        "top2_logit": "FLOAT",
        "top_ties": "INTEGER",
    },
    "sums": {
        **_IDENTITY,
        "steps": "BIGINT",
        "drafted_steps": "BIGINT",
        "proposed": "BIGINT",
        "accepted": "BIGINT",
        "emitted": "BIGINT",
        "step_ns": "BIGINT",
        "draft_ns": "BIGINT",
        "forward_ns": "BIGINT",
        "ar_job_id": "VARCHAR",
        "passes_past_ar": "BIGINT",
        "ar_pass_ns": "BIGINT",
    },
    "witness": {
        "run_id": "VARCHAR",
        "kind": "VARCHAR",
        "job_id": "VARCHAR",
        "attempt": "INTEGER",
        "workload": "VARCHAR",
        "prompt_id": "VARCHAR",
        "arm": "VARCHAR",
        "position": "INTEGER",
        "shape": "VARCHAR",
        "queries": "INTEGER",
        "token_id": "INTEGER",
        "token_logit": "FLOAT",
        "top1_id": "INTEGER",
        "top1_logit": "FLOAT",
        "top2_id": "INTEGER",
        "top2_logit": "FLOAT",
        "recorded_logit": "FLOAT",
        "worker_id": "VARCHAR",
        "device": "VARCHAR",
    },
    "calibration": {
        "run_id": "VARCHAR",
        "worker_id": "VARCHAR",
        "device": "VARCHAR",
        "model": "VARCHAR",
        "dtype": "VARCHAR",
        "engine": "VARCHAR",
        "stack": "VARCHAR",
        "kind": "VARCHAR",
        "context": "INTEGER",
        "queries": "INTEGER",
        "bytes": "BIGINT",
        "sample": "INTEGER",
        "ns": "BIGINT",
    },
}
"""Tables of Parquet files that the ledger names."""

PROMPTS: Mapping[str, str] = {
    "workload": "VARCHAR",
    "prompt_id": "VARCHAR",
    "source": "VARCHAR",
    "text": "VARCHAR",
    "messages": "VARCHAR",
    "prompt_ids": "INTEGER[]",
    "prompt_sha": "VARCHAR",
    "warmup": "BOOLEAN",
}
"""`prompts.parquet`, written once when the run is planned."""

LEDGER: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "meta": ("select key, value from meta", {"key": "VARCHAR", "value": "VARCHAR"}),
    "plan": (
        "select workload, arm, count(*), count(distinct prompt_id), sum(state = 'done'), sum(state = 'failed'), "
        "min(rowid) from jobs group by workload, arm",
        {
            "workload": "VARCHAR",
            "arm": "VARCHAR",
            "jobs": "BIGINT",
            "prompts": "BIGINT",
            "done": "BIGINT",
            "failed": "BIGINT",
            "place": "BIGINT",
        },
    ),
    "attempts": (
        "select shard_id, job_id, attempt, kind, message, node, worker_id, at from attempts",
        {
            "shard_id": "VARCHAR",
            "job_id": "VARCHAR",
            "attempt": "INTEGER",
            "kind": "VARCHAR",
            "message": "VARCHAR",
            "node": "VARCHAR",
            "worker_id": "VARCHAR",
            "at": "VARCHAR",
        },
    ),
    "files": (
        "select name, tbl, generation, rows, bytes, sha256 from files where live",
        {
            "name": "VARCHAR",
            "tbl": "VARCHAR",
            "generation": "INTEGER",
            "rows": "BIGINT",
            "bytes": "BIGINT",
            "sha256": "VARCHAR",
        },
    ),
    "workers": (
        "select worker_id, node, device, case when json_valid(facts) then facts end, joined_at, left_at from workers",
        {
            "worker_id": "VARCHAR",
            "node": "VARCHAR",
            "device": "VARCHAR",
            "facts": "VARCHAR",
            "joined_at": "VARCHAR",
            "left_at": "VARCHAR",
        },
    ),
}
"""What of the ledger the views read: the SQLite query that gives it, and its columns."""

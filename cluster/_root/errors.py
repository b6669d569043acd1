"""Every error that dfbench raises on purpose.

    DfbenchError
    ├── UsageError          the request was wrong: one sentence, exit status 2, nothing written
    │   ├── SweepError      a sweep or arms file
    │   ├── OptionError     an unknown drafter, or an option it does not have or cannot take
    │   ├── WorkloadError   a workload or one of its rows
    │   ├── ModelError      a model, tokenizer or chat template that cannot be had or used
    │   ├── RunError        a run directory that is missing, unusable or of another sweep
    │   ├── ClusterError    a Ray cluster or node that cannot be reached, joined or started
    │   └── QueryError      SQL that does not parse, names an unknown view or reaches outside the run
    ├── DraftError          a drafter broke its contract (too many nodes, a parent after its child)
    ├── EngineError         the target cannot do what was asked of it (context, cache type)
    ├── RecordError         rows that break an identity of the record format; the job fails
    └── Cancelled           the job was told to stop

All take one message, so they survive pickling on their way back from a Ray worker.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DfbenchError(Exception):
    """Base class of all errors of this package."""


class UsageError(DfbenchError):
    """The request was wrong; the message says what to write instead."""


class SweepError(UsageError):
    """A sweep or arms file cannot be used."""


class OptionError(UsageError):
    """An unknown drafter or a drafter option that does not exist or has a bad value."""


class WorkloadError(UsageError):
    """A workload cannot be read."""


class ModelError(UsageError):
    """A model, tokenizer or chat template cannot be had or used."""


class RunError(UsageError):
    """A run directory cannot be used."""


class ClusterError(UsageError):
    """A Ray cluster or node cannot be reached, joined or started."""


class QueryError(UsageError):
    """A SQL query was refused."""


class DraftError(DfbenchError):
    """A drafter broke its contract."""


class EngineError(DfbenchError):
    """The target cannot do what was asked of it."""


class RecordError(DfbenchError):
    """Rows break an identity of the record format."""


class Cancelled(DfbenchError):
    """The job was told to stop."""


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """One sentence for a name that does not exist: what it was, the nearest known one, or all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if near:
        return f"unknown {kind} '{name}': did you mean '{near[0]}'?"
    return f"unknown {kind} '{name}': write one of {', '.join(names)}." if names else f"unknown {kind} '{name}'."

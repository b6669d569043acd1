"""What an exception that came back from Ray means for the shard, in the ledger's kinds of failure."""

from __future__ import annotations

from ray import exceptions as ray_errors

from dfbench.workers.redact import redact

NODE_DEATH = ("its node has died", "node was terminated")
"""How Ray says that the whole node went, not only the worker's process; other texts mention nodes and raylets too."""

PREAMBLE = ("class_name:", "actor_id:", "pid:", "name:", "namespace:", "ip:", "The actor died unexpectedly")


def classify(error: BaseException) -> tuple[str, str]:
    """(kind, message) of what `ray.get` raised.

    `error` is the shard's own fault (`run` turns what jobs raise into outcomes, so it is one of dfbench), `setup` an
    actor that could not be made; the rest says nothing against the shard. `OutOfMemoryError` is outside Ray's actor
    family and is the node's memory, not the device's.
    """
    message = first_lines(error)
    if isinstance(error, ray_errors.OutOfMemoryError):
        return "memory", message
    if isinstance(error, ray_errors.ActorUnavailableError):
        return "node", message
    if isinstance(error, ray_errors.RayActorError):
        if error.actor_init_failed:
            return "setup", message
        death = " ".join(str(error).split())
        return ("node" if any(phrase in death for phrase in NODE_DEATH) else "worker"), message
    if isinstance(error, ray_errors.NodeDiedError | ray_errors.LocalRayletDiedError | ray_errors.RpcError):
        return "node", message
    if isinstance(error, ray_errors.WorkerCrashedError):
        return "worker", message
    if isinstance(error, ray_errors.RayTaskError | ray_errors.UnserializableException):
        return "error", message
    return "object", message


def first_lines(error: BaseException, lines: int = 6, width: int = 800) -> str:
    """The informative start of an exception's text: Ray's own run over pages."""
    told = [line.strip() for line in str(error).strip().splitlines()]
    told = [line for line in told if line and not line.startswith(PREAMBLE)]
    return redact(f"{type(error).__name__}: {chr(10).join(told[:lines])}")[:width]

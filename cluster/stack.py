"""The versions that all machines of a cluster must share, as Ray node labels.

`dfbench up` and `dfbench join` start each node with these labels, so the head's versions can be read by a machine that
wants to join, and every node's by `dfbench nodes`, for as long as the node is up and no longer.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, entry_points, version

from dfbench import __version__
from dfbench.drafters.registry import ENTRY_POINT_GROUP

PACKAGES = ("ray", "torch", "transformers")
VERSION_PREFIX = "dfbench/"
PLUGIN_PREFIX = "dfbench.plugin/"
DEVICE_LABEL = "dfbench/device"


def stack() -> dict[str, str]:
    """This machine's versions by label: Python, the packages that decide results, and each drafter plug-in."""
    found = {"dfbench/python": platform.python_version(), "dfbench/dfbench": __version__}
    for package in PACKAGES:
        try:
            found[VERSION_PREFIX + package] = version(package)
        except PackageNotFoundError:
            found[VERSION_PREFIX + package] = "missing"
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.dist is not None:
            found[PLUGIN_PREFIX + label_value(point.dist.name)] = point.dist.version
    return {key: label_value(value) for key, value in found.items()}


def versions(labels: Mapping[str, str]) -> dict[str, str]:
    """Those of a node's labels that are versions."""
    return {
        key: value
        for key, value in labels.items()
        if key.startswith((VERSION_PREFIX, PLUGIN_PREFIX)) and key not in _FACTS
    }


def differences(mine: Mapping[str, str], head: Mapping[str, str], here: str = "here") -> list[str]:
    """What keeps `mine` from working beside `head`, one phrase each; a plug-in only one side has counts."""
    found = []
    for key in sorted({*mine, *head}):
        own, other = mine.get(key), head.get(key)
        if own != other:
            name = ("plug-in " if key.startswith(PLUGIN_PREFIX) else "") + key.partition("/")[2]
            found.append(f"{name} is {_version(own)} {here} and {_version(other)} on the head")
    return found


def phrases(labels: Mapping[str, str]) -> list[str]:
    """Versions as a person writes them."""
    return [f"{key.partition('/')[2]} {value}" for key, value in sorted(as_written(labels).items())]


def as_written(labels: Mapping[str, str]) -> dict[str, str]:
    """Version labels with the versions as their packages give them."""
    return {key: _version(value) for key, value in labels.items()}


def _version(label: str | None) -> str:
    """A version as its package gives it: what a label cannot hold of one is the plus before its local part."""
    return label.replace("_", "+", 1) if label else "not installed"


def device(labels: Mapping[str, str]) -> str:
    """A node's device as a person reads it, "" where its labels do not say."""
    return labels.get(DEVICE_LABEL, "").replace("_", " ")


def label_value(text: str) -> str:
    """`text` as a Ray label value: letters, digits, `.`, `_`, `-`, at most 63 of them."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", text)[:63].strip("_.-") or "unknown"


def format_labels(labels: Mapping[str, str]) -> str:
    """Labels as `ray start --labels` takes them."""
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))


_FACTS = {DEVICE_LABEL, "dfbench/memory-gb", "dfbench/devices"}

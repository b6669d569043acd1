"""What a device did while a job ran: clocks, temperature, power, why its clocks were held down, and who else used it.

Read before and after a job, never inside its timed region. NVIDIA devices answer through NVML (`nvidia-ml-py`), whose
own counters tell how long clocks were held down in between; the CPU answers with what other processes took of it.
A reading that a device does not offer is None, and so is every judgement that would need it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import psutil

# Reasons that hold clocks below what the device could do; idling and clocks set on purpose are not among them.
THROTTLES = {
    0x04: "power_cap",
    0x08: "hardware_slowdown",
    0x10: "sync_boost",
    0x20: "thermal",
    0x40: "hardware_thermal",
    0x80: "power_brake",
}
_POLICIES = {"power": 0, "thermal": 1, "board_limit": 3, "reliability": 5}
BUSY_SHARE = 0.10
"""Share of the machine's CPU time that others may take before a CPU job counts as disturbed."""
SHORTEST_S = 0.5
"""A CPU job shorter than this is not judged: the kernel counts CPU time in ticks of 10 ms."""
HOT_CELSIUS = 87


@dataclass(frozen=True)
class Device:
    """One NVIDIA device now. Memory in bytes, clocks in MHz, power in W; `processes` are the pids that hold memory."""

    index: int
    uuid: str
    name: str
    driver: str | None
    memory_total: int | None
    memory_free: int | None
    sm_mhz: int | None
    memory_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    power_limit_w: float | None
    reasons: tuple[str, ...] | None
    processes: tuple[int, ...] | None


class Monitor(Protocol):
    """Watches one device over one job: `begin` before it, `end` after it."""

    def begin(self) -> None: ...

    def end(self) -> Telemetry: ...


@dataclass(frozen=True)
class Telemetry:
    """The marks of one job and, as JSON-ready `facts`, the readings behind them. A mark is None where nobody can tell.

    `throttled`: the device held its clocks down. `disturbed`: another process used the device.
    """

    throttled: bool | None
    disturbed: bool | None
    facts: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        """What the jobs table keeps."""
        return {"disturbed": self.disturbed, **self.facts}


def load_nvml() -> Any:
    """NVML, initialised; None on a machine without an NVIDIA driver."""
    pynvml: Any = import_module("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def devices(nvml: Any | None = None) -> list[Device]:
    """Every NVIDIA device of this machine, empty where there is none."""
    nvml = nvml or load_nvml()
    if nvml is None:
        return []
    asked = _Asker(nvml)
    driver = asked("nvmlSystemGetDriverVersion")
    handles = [asked("nvmlDeviceGetHandleByIndex", index) for index in range(asked("nvmlDeviceGetCount") or 0)]
    return [_device(asked, handle, index, driver) for index, handle in enumerate(handles) if handle is not None]


def problems(device: Device) -> list[str]:
    """What would spoil a measurement on this device now, one phrase each."""
    found = [f"clocks are held down ({reason})" for reason in device.reasons or ()]
    if device.temperature_c is not None and device.temperature_c >= HOT_CELSIUS:
        found.append(f"{device.temperature_c} °C hot")
    return found


def open_monitor(uuid: str | None = None, nvml: Any | None = None) -> Monitor:
    """A monitor of the NVIDIA device with this UUID (torch: `get_device_properties(d).uuid`), of the CPU without one.

    A device that NVML does not know gives a monitor that says nothing rather than one of the wrong device.
    """
    if uuid is None:
        return CpuMonitor()
    nvml = nvml or load_nvml()
    if nvml is None:
        return NoMonitor()
    handle = _Asker(nvml)("nvmlDeviceGetHandleByUUID", uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
    return NoMonitor() if handle is None else DeviceMonitor(nvml, handle)


class NoMonitor:
    """For a device that offers no telemetry."""

    def begin(self) -> None:
        """Nothing to note."""

    def end(self) -> Telemetry:
        """Nothing is known."""
        return Telemetry(None, None, {})


class DeviceMonitor:
    """One NVIDIA device, from the process that holds a context on it."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._ask = _Asker(nvml)
        self._handle = handle
        self._before: dict[str, Any] = {}

    def begin(self) -> None:
        """Note counters and readings before the job."""
        self._before = {"held": self._held(), "reading": self._reading(), "since_us": time.time_ns() // 1000}

    def end(self) -> Telemetry:
        """Compare with `begin`."""
        before, after = self._before["reading"], self._reading()
        held = _differences(self._before["held"], self._held())
        counted = None if held is None else [name for name, ns in held.items() if ns > 0]
        reasons = _union(before["reasons"], after["reasons"], counted)
        foreign = self._foreign()
        used = self._used(foreign)
        facts = {
            "sm_mhz": [before["sm_mhz"], after["sm_mhz"]],
            "memory_mhz": [before["memory_mhz"], after["memory_mhz"]],
            "temperature_c": [before["temperature_c"], after["temperature_c"]],
            "power_w": [before["power_w"], after["power_w"]],
            "reasons": reasons,
            "held_ns": held,
            "foreign": sorted(foreign) if foreign is not None else None,
            "foreign_busy": sorted(used) if used is not None else None,
        }
        return Telemetry(bool(reasons) if reasons is not None else None, self._disturbed(foreign, used), facts)

    def _disturbed(self, foreign: set[int] | None, used: set[int] | None) -> bool | None:
        if used is not None:
            return bool(used)
        return None if foreign is None else bool(foreign)

    def _reading(self) -> dict[str, Any]:
        return _reading(self._ask, self._handle)

    def _held(self) -> dict[str, int] | None:
        """Nanoseconds for which each policy has held clocks down since the driver was loaded."""
        found = {name: self._ask("nvmlDeviceGetViolationStatus", self._handle, p) for name, p in _POLICIES.items()}
        return {name: int(status.violationTime) for name, status in found.items() if status is not None} or None

    def _foreign(self) -> set[int] | None:
        """Other processes on the device; None where pids cannot be told apart (another pid namespace)."""
        pids = _pids(self._ask, self._handle)
        if pids is None:
            return None
        own = {os.getpid()}
        return pids - own if pids & own or not pids else None

    def _used(self, foreign: set[int] | None) -> set[int] | None:
        """Those of them that kept it busy since `begin`; None where the device does not say."""
        if foreign is None:
            return None
        samples = self._ask("nvmlDeviceGetProcessUtilization", self._handle, self._before["since_us"], empty=())
        if samples is None:
            return None
        return {int(sample.pid) for sample in samples if sample.smUtil > 0 and int(sample.pid) != os.getpid()}


class CpuMonitor:
    """The CPU: how much of the machine other processes, and the hypervisor, took during the job."""

    def begin(self) -> None:
        """Note what everybody has used so far."""
        self._before = _cpu_times()

    def end(self) -> Telemetry:
        """Compare with `begin`. `foreign_cpus` is in CPUs; a CPU has no throttle reasons to report."""
        wall, busy, stolen, own = (after - before for after, before in zip(_cpu_times(), self._before, strict=True))
        cpus = psutil.cpu_count() or 1
        foreign = max(busy - own, 0.0) / wall if wall > 0 else 0.0
        stolen = stolen / wall if wall > 0 else 0.0
        facts = {"cpus": cpus, "foreign_cpus": round(foreign, 3), "stolen_cpus": round(stolen, 3)}
        disturbed = foreign + stolen > BUSY_SHARE * cpus if wall >= SHORTEST_S else None
        return Telemetry(None, disturbed, facts)


class _Asker:
    """Calls NVML by name; what a device, or an old driver, does not offer is None, and "nothing found" is `empty`."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml

    def __call__(self, name: str, *args: Any, empty: Any = None) -> Any:
        try:
            return getattr(self._nvml, name)(*args)
        except self._nvml.NVMLError as error:
            return empty if getattr(error, "value", None) == _NOT_FOUND else None


_NOT_FOUND = 6
_SM, _MEMORY, _GPU_SENSOR = 1, 2, 0


def _reading(ask: _Asker, handle: Any) -> dict[str, Any]:
    milliwatts = ask("nvmlDeviceGetPowerUsage", handle)
    bits = ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
    return {
        "sm_mhz": ask("nvmlDeviceGetClockInfo", handle, _SM),
        "memory_mhz": ask("nvmlDeviceGetClockInfo", handle, _MEMORY),
        "temperature_c": ask("nvmlDeviceGetTemperature", handle, _GPU_SENSOR),
        "power_w": None if milliwatts is None else milliwatts / 1000,
        "reasons": None if bits is None else [name for bit, name in THROTTLES.items() if bits & bit],
    }


def _device(ask: _Asker, handle: Any, index: int, driver: str | None) -> Device:
    memory = ask("nvmlDeviceGetMemoryInfo", handle)
    limit = ask("nvmlDeviceGetEnforcedPowerLimit", handle)
    reading: dict[str, Any] = _reading(ask, handle)
    if reading["reasons"] is not None:
        reading["reasons"] = tuple(reading["reasons"])
    pids = _pids(ask, handle)
    return Device(
        index=index,
        uuid=ask("nvmlDeviceGetUUID", handle) or "",
        name=ask("nvmlDeviceGetName", handle) or "unknown",
        driver=driver,
        memory_total=None if memory is None else int(memory.total),
        memory_free=None if memory is None else int(memory.free),
        power_limit_w=None if limit is None else limit / 1000,
        processes=None if pids is None else tuple(sorted(pids)),
        **reading,
    )


def _pids(ask: _Asker, handle: Any) -> set[int] | None:
    """Processes that compute on the device; those that only draw a desktop on it are not counted."""
    found = ask("nvmlDeviceGetComputeRunningProcesses", handle, empty=())
    return None if found is None else {int(process.pid) for process in found}


def _differences(before: dict[str, int] | None, after: dict[str, int] | None) -> dict[str, int] | None:
    if before is None or after is None:
        return None
    return {name: after[name] - before[name] for name in after if name in before}


def _union(*lists: Iterable[str] | None) -> list[str] | None:
    known = [names for names in lists if names is not None]
    return sorted({name for names in known for name in names}) if known else None


def _cpu_times() -> tuple[float, float, float, float]:
    """Seconds: wall, CPU time used by everybody, taken by the hypervisor, used by this process and its children."""
    times = psutil.cpu_times()
    stolen = getattr(times, "steal", 0.0)
    idle = times.idle + getattr(times, "iowait", 0.0)
    # Guest time is already within user time.
    total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    own = psutil.Process().cpu_times()
    return (
        time.monotonic(),
        total - idle - stolen,
        stolen,
        own.user + own.system + own.children_user + own.children_system,
    )

"""Device telemetry, on a stand-in for NVML: what is read, what marks a job, and what nobody can tell."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from dfbench.workers import telemetry
from dfbench.workers.telemetry import CpuMonitor, DeviceMonitor, NoMonitor, Telemetry, devices, open_monitor, problems

OWN = os.getpid()
STRANGER = 10**9


class NvmlError(Exception):
    def __init__(self, value: int) -> None:
        self.value = value


NOT_SUPPORTED, NOT_FOUND = 3, 6


class Card:
    """One device whose readings a test sets; a reading that is an int in `broken` raises that NVML error."""

    NVMLError = NvmlError

    def __init__(self) -> None:
        self.uuid = "GPU-1234"
        self.reasons = 0
        self.violations = {0: 0, 1: 0, 3: 0, 5: 0}
        self.pids = [OWN]
        self.samples: list[tuple[int, int, int]] = []  # pid, busy per cent, µs since the epoch
        self.temperature = 60
        self.broken: dict[str, int] = {}

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in object.__getattribute__(self, "broken"):
            value = self.broken[name]

            def fail(*_: Any) -> None:
                raise NvmlError(value)

            return fail
        return object.__getattribute__(self, name)

    def nvmlSystemGetDriverVersion(self) -> str:
        return "575.10"

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"handle-{index}"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != self.uuid:
            raise NvmlError(NOT_FOUND)
        return "handle-0"

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return self.uuid

    def nvmlDeviceGetName(self, handle: str) -> str:
        return "NVIDIA GeForce RTX 5090"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(total=32 * 2**30, free=30 * 2**30)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return 575_000

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return {1: 2400, 2: 14001}[kind]

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return self.temperature

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 420_500

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return self.reasons

    def nvmlDeviceGetViolationStatus(self, handle: str, policy: int) -> Any:
        return SimpleNamespace(violationTime=self.violations[policy], referenceTime=0)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        return [SimpleNamespace(pid=pid) for pid in self.pids]

    def nvmlDeviceGetProcessUtilization(self, handle: str, since: int) -> list[Any]:
        found = [SimpleNamespace(pid=pid, smUtil=busy) for pid, busy, at in self.samples if at > since]
        if not found:
            raise NvmlError(NOT_FOUND)
        return found


def job(card: Card, during: Callable[[], object] = lambda: None) -> Telemetry:
    monitor = DeviceMonitor(card, "handle-0")
    monitor.begin()
    during()
    return monitor.end()


def test_a_quiet_job_is_not_marked() -> None:
    seen = job(Card())
    assert (seen.throttled, seen.disturbed) == (False, False)
    assert seen.facts["sm_mhz"] == [2400, 2400]
    assert seen.facts["power_w"] == [420.5, 420.5]
    assert seen.as_json()["disturbed"] is False


@pytest.mark.parametrize(("bit", "name"), telemetry.THROTTLES.items())
def test_each_reason_that_holds_clocks_down_marks_the_job(bit: int, name: str) -> None:
    card = Card()
    seen = job(card, lambda: setattr(card, "reasons", bit))
    assert seen.throttled is True
    assert seen.facts["reasons"] == [name]


@pytest.mark.parametrize("bit", [0x001, 0x002, 0x100])
def test_idle_and_chosen_clocks_are_not_throttling(bit: int) -> None:
    card = Card()
    card.reasons = bit
    assert job(card).throttled is False


def test_throttling_between_the_two_readings_shows_in_the_counters() -> None:
    card = Card()
    card.violations[1] = 5_000_000
    seen = job(card, lambda: card.violations.update({1: 9_000_000}))
    assert seen.throttled is True
    assert seen.facts["held_ns"]["thermal"] == 4_000_000
    assert seen.facts["reasons"] == ["thermal"]


def test_old_throttling_marks_nothing() -> None:
    card = Card()
    card.violations[0] = 10**12
    assert job(card).throttled is False


def test_a_stranger_that_kept_the_device_busy_disturbs() -> None:
    card = Card()
    card.pids = [OWN, STRANGER]
    seen = job(card, lambda: card.samples.append((STRANGER, 30, time.time_ns() // 1000 + 1)))
    assert seen.disturbed is True
    assert seen.facts["foreign_busy"] == [STRANGER]


def test_a_stranger_that_only_holds_memory_is_noted_but_does_not_disturb() -> None:
    card = Card()
    card.pids = [OWN, STRANGER]
    card.samples = [(STRANGER, 90, 1)]  # long before the job
    seen = job(card, lambda: card.samples.append((STRANGER, 0, time.time_ns() // 1000 + 1)))
    assert seen.disturbed is False
    assert seen.facts["foreign"] == [STRANGER]


def test_without_utilisation_samples_a_stranger_counts_as_disturbing() -> None:
    card = Card()
    card.pids = [OWN, STRANGER]
    card.broken = {"nvmlDeviceGetProcessUtilization": NOT_SUPPORTED}
    assert job(card).disturbed is True


def test_pids_of_another_namespace_judge_nobody() -> None:
    card = Card()
    card.pids = [STRANGER]  # ours is not among them although we hold the device
    seen = job(card)
    assert seen.disturbed is None
    assert seen.facts["foreign"] is None


def test_what_a_device_does_not_offer_is_unknown_not_fine() -> None:
    card = Card()
    every = [name for name in dir(Card) if name.startswith("nvmlDevice")]
    card.broken = dict.fromkeys(every, NOT_SUPPORTED)
    seen = job(card)
    assert (seen.throttled, seen.disturbed) == (None, None)
    assert seen.facts["temperature_c"] == [None, None]


def test_counters_alone_can_tell_that_nothing_was_held_down() -> None:
    card = Card()
    card.broken = {"nvmlDeviceGetViolationStatus": NOT_SUPPORTED}
    assert job(card).throttled is False
    card.broken = {"nvmlDeviceGetCurrentClocksEventReasons": NOT_SUPPORTED}
    assert job(card).throttled is False
    assert job(card, lambda: card.violations.update({0: 7})).throttled is True


def test_devices_lists_what_nvml_sees() -> None:
    card = Card()
    card.pids = [STRANGER]
    (device,) = devices(card)
    assert (device.name, device.driver, device.memory_free) == ("NVIDIA GeForce RTX 5090", "575.10", 30 * 2**30)
    assert (device.processes, device.reasons, device.power_limit_w) == ((STRANGER,), (), 575.0)
    assert problems(device) == []


def test_a_hot_and_throttled_device_is_a_problem() -> None:
    card = Card()
    card.reasons, card.temperature = 0x20, 91
    assert problems(devices(card)[0]) == ["clocks are held down (thermal)", "91 °C hot"]


def test_the_monitor_is_that_of_the_uuid_and_of_no_other_device() -> None:
    assert isinstance(open_monitor("1234", Card()), DeviceMonitor)  # torch writes UUIDs without the prefix
    unknown = open_monitor("GPU-other", Card())
    assert isinstance(unknown, NoMonitor)
    unknown.begin()
    assert unknown.end() == Telemetry(None, None, {})


def test_without_a_driver_there_are_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "load_nvml", lambda: None)
    assert devices() == []
    assert isinstance(open_monitor("GPU-1234"), NoMonitor)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float, float, float]]:
    """What `CpuMonitor` will read: wall, busy, stolen, own."""
    script: list[tuple[float, float, float, float]] = []
    monkeypatch.setattr(telemetry, "_cpu_times", lambda: script.pop(0))
    monkeypatch.setattr("psutil.cpu_count", lambda: 4)
    return script


@pytest.mark.parametrize(
    ("after", "disturbed"),
    [
        ((10.0, 35.0, 0.0, 34.0), False),  # ours: 34 of 35 CPU seconds
        ((10.0, 20.0, 0.0, 10.0), True),  # a stranger took one CPU of four
        ((10.0, 10.0, 9.0, 10.0), True),  # the hypervisor took 0.9 CPUs
        ((0.1, 0.3, 0.0, 0.1), None),  # too short to tell
    ],
)
def test_cpu_jobs_are_judged_by_what_others_took(
    times: list[tuple[float, float, float, float]], after: tuple[float, float, float, float], disturbed: bool | None
) -> None:
    times += [(0.0, 0.0, 0.0, 0.0), after]
    monitor = CpuMonitor()
    monitor.begin()
    seen = monitor.end()
    assert (seen.throttled, seen.disturbed) == (None, disturbed)


def test_cpu_readings_are_real() -> None:
    monitor = open_monitor()
    monitor.begin()
    subprocess.run([sys.executable, "-c", "sum(range(10**6))"], check=True)
    facts = monitor.end().facts
    assert facts["cpus"] >= 1
    assert 0 <= facts["foreign_cpus"] <= facts["cpus"] * 1.5

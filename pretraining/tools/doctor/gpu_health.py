"""How an NVIDIA GPU is: its clocks and what holds them down, power, temperature, ECC errors, its link to the host.

    work on the GPU, meanwhile: nvidia-smi --query-gpu … -> `parse_gpu_state` -> `check_gpu`: a verdict for each

Asked under load: a GPU that has nothing to do clocks down by itself. Where there is no nvidia-smi (AMD, a container
without it) that is said, and nothing is bad.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pretraining.tools.doctor.verdicts import Check

FIELDS = (
    "uuid",
    "name",
    "clocks.current.sm",
    "clocks.max.sm",
    "clocks_throttle_reasons.active",
    "temperature.gpu",
    "power.limit",
    "power.default_limit",
    "ecc.mode.current",
    "ecc.errors.corrected.volatile.total",
    "ecc.errors.uncorrected.volatile.total",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "persistence_mode",
)
"""Of `nvidia-smi --help-query-gpu`; drivers since 450 know all of them."""
ROW_FIELDS = ("gpu_uuid", "remapped_rows.pending", "remapped_rows.failure")
"""Of `nvidia-smi --help-query-remapped-rows`; GPUs since the A100."""
ANSWER_SECONDS = 15.0

IDLE = 0x1
# nvml.h, nvmlClocksEventReason…: what the bits of clocks_throttle_reasons.active mean.
HARDWARE_REASONS = {
    0x08: "the hardware slows it down (heat, power, or a supply that fails)",
    0x40: "it is too hot: the hardware slows it down",
    0x80: "the power supply asks it to brake",
}
SOFTWARE_REASONS = {
    0x02: "clocks are fixed by an administrator (nvidia-smi -ac or -lgc)",
    0x10: "it follows the slowest GPU of a group (sync boost)",
    0x20: "it is near its limit of heat",
}
CORRECTED_ERRORS = 100


@dataclass(frozen=True)
class GpuState:
    """What nvidia-smi says of a GPU; None where the GPU does not say.

    Attributes:
        clock_mhz, max_clock_mhz: of its multiprocessors.
        reasons: bits of what holds the clocks down.
        power_limit_watts, default_limit_watts: set now, and by the maker.
        corrected_errors, uncorrected_errors: of its memory, since the driver was loaded.
        link_width, max_link_width: lanes of PCI Express.
        pending_rows, failed_rows: whether rows of its memory wait to be replaced, or could not be.
    """

    name: str
    clock_mhz: float | None
    max_clock_mhz: float | None
    reasons: int | None
    temperature: float | None
    power_limit_watts: float | None
    default_limit_watts: float | None
    has_ecc: bool | None
    corrected_errors: float | None
    uncorrected_errors: float | None
    link_width: float | None
    max_link_width: float | None
    is_persistent: bool | None
    pending_rows: bool | None = None
    failed_rows: bool | None = None


def gpu_state(uuid: str, work: Callable[[], object]) -> GpuState | None:
    """Asks how a GPU is while it works; None where nvidia-smi does not answer.

    Args:
        uuid: of the GPU, with or without "GPU-" before it.
        work: keeps the GPU busy for some milliseconds, and waits for it.
    """
    answer = _ask("--query-gpu", FIELDS, work)
    rows = _ask("--query-remapped-rows", ROW_FIELDS, work)
    return parse_gpu_state(uuid, answer, rows)


def parse_gpu_state(uuid: str, answer: str, rows: str = "") -> GpuState | None:
    """Reads a GPU's line in the answers of nvidia-smi, --format=csv,noheader,nounits; None where there is none."""
    found = _line_of(uuid, answer, len(FIELDS))
    if found is None:
        return None
    values = dict(zip(FIELDS, found, strict=True))
    row = _line_of(uuid, rows, len(ROW_FIELDS))
    reasons = values["clocks_throttle_reasons.active"]
    return GpuState(
        name=values["name"],
        clock_mhz=_number(values["clocks.current.sm"]),
        max_clock_mhz=_number(values["clocks.max.sm"]),
        reasons=int(reasons, 16) if reasons.lower().startswith("0x") else None,
        temperature=_number(values["temperature.gpu"]),
        power_limit_watts=_number(values["power.limit"]),
        default_limit_watts=_number(values["power.default_limit"]),
        has_ecc=_switch(values["ecc.mode.current"]),
        corrected_errors=_number(values["ecc.errors.corrected.volatile.total"]),
        uncorrected_errors=_number(values["ecc.errors.uncorrected.volatile.total"]),
        link_width=_number(values["pcie.link.width.current"]),
        max_link_width=_number(values["pcie.link.width.max"]),
        is_persistent=_switch(values["persistence_mode"]),
        pending_rows=_switch(row[1]) if row else None,
        failed_rows=_switch(row[2]) if row else None,
    )


def check_gpu(state: GpuState | None) -> Iterator[Check]:
    """Yields a verdict for each item of a GPU."""
    if state is None:
        yield Check("GPU health", "not known", "nvidia-smi does not answer here")
        return
    yield from _check_clocks(state)
    yield from _check_power(state)
    yield from _check_memory(state)
    if state.link_width is not None and state.max_link_width is not None:
        lanes = f"{state.link_width:g} of {state.max_link_width:g} lanes of PCI Express"
        if state.link_width < state.max_link_width:
            yield Check("GPU link", "look at", lanes, "seat the card again, or ask for another machine")
        else:
            yield Check("GPU link", "good", lanes)


def _check_clocks(state: GpuState) -> Iterator[Check]:
    if state.reasons is None or state.clock_mhz is None or state.max_clock_mhz is None:
        yield Check("GPU clocks", "not known", "nvidia-smi does not say")
        return
    heat = "" if state.temperature is None else f" at {state.temperature:g} °C"
    clock = f"{state.clock_mhz:g} of {state.max_clock_mhz:g} MHz under load{heat}"
    hard = [words for bit, words in HARDWARE_REASONS.items() if state.reasons & bit]
    soft = [words for bit, words in SOFTWARE_REASONS.items() if state.reasons & bit]
    if hard:
        advice = "look at cooling and power of its machine; leave it out until then"
        yield Check("GPU clocks", "bad", f"{clock}: {'; '.join(hard)}", advice)
    elif soft:
        yield Check(
            "GPU clocks", "look at", f"{clock}: {'; '.join(soft)}", "nvidia-smi -q -d CLOCK,PERFORMANCE says more"
        )
    elif state.clock_mhz < state.max_clock_mhz / 2 and not state.reasons & IDLE:
        yield Check("GPU clocks", "look at", f"{clock}: less than half", "nvidia-smi -q -d PERFORMANCE says why")
    else:
        yield Check("GPU clocks", "good", clock)


def _check_power(state: GpuState) -> Iterator[Check]:
    if state.power_limit_watts is None or state.default_limit_watts is None:
        return
    limit = f"{state.power_limit_watts:g} W of {state.default_limit_watts:g} W by default"
    if state.power_limit_watts < state.default_limit_watts:
        advice = f"nvidia-smi -pl {state.default_limit_watts:g}, unless the cap is meant"
        yield Check("GPU power limit", "look at", limit, advice)
    else:
        yield Check("GPU power limit", "good", limit)


def _check_memory(state: GpuState) -> Iterator[Check]:
    item = "GPU memory errors"
    if state.failed_rows or state.uncorrected_errors:
        found = f"{state.uncorrected_errors or 0:g} uncorrected errors" + ", rows that cannot be replaced" * bool(
            state.failed_rows
        )
        advice = "leave this GPU out, reset or replace it: what it computes cannot be trusted"
        yield Check(item, "bad", found, advice)
    elif state.pending_rows:
        yield Check(item, "look at", "rows of its memory wait to be replaced", "reset the GPU between two jobs")
    elif state.corrected_errors is not None and state.corrected_errors >= CORRECTED_ERRORS:
        found = f"{state.corrected_errors:g} corrected errors since the driver was loaded"
        yield Check(item, "look at", found, "watch whether they grow: such memory fails next")
    elif state.has_ecc is False:
        advice = "nvidia-smi -e 1 and a reset, unless it is meant: flipped bits go unnoticed"
        yield Check(item, "look at", "ECC is off", advice)
    elif state.uncorrected_errors is None:
        yield Check(item, "not known", "this GPU counts none")
    else:
        yield Check(item, "good", f"{state.corrected_errors or 0:g} corrected, none uncorrected")


def _ask(query: str, fields: Sequence[str], work: Callable[[], object]) -> str:
    """Returns what nvidia-smi answers; a field that it does not know is left out of the question, and N/A."""
    known = list(fields)
    while known:
        code, answer = _run_while_working(f"{query}={','.join(known)}", work)
        if code == 0:
            lines = (dict(zip(known, line.split(","), strict=False)) for line in answer.splitlines())
            return "\n".join(",".join(line.get(field, "[N/A]") for field in fields) for line in lines)
        refused = re.search(r'[Ff]ield "(.+?)" is not a valid', answer)
        if refused is None or refused[1] not in known:
            break
        known.remove(refused[1])
    return ""


def _run_while_working(question: str, work: Callable[[], object]) -> tuple[int, str]:
    """Returns exit code and output of nvidia-smi, asked while the GPU works."""
    command = ["nvidia-smi", question, "--format=csv,noheader,nounits"]
    deadline = time.monotonic() + ANSWER_SECONDS
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            while process.poll() is None and time.monotonic() < deadline:
                work()
            if process.poll() is None:  # a driver that hangs
                process.kill()
                return 1, ""
            answer, _ = process.communicate()
            return process.returncode, answer
    except OSError:
        return 1, ""


def _line_of(uuid: str, answer: str, fields: int) -> list[str] | None:
    lines = ([value.strip() for value in line.split(",")] for line in answer.splitlines())
    wanted = uuid.removeprefix("GPU-")
    return next((each for each in lines if len(each) == fields and each[0].removeprefix("GPU-") == wanted), None)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # [N/A], [Not Supported]
        return None


def _switch(text: str) -> bool | None:
    words = {"enabled": True, "disabled": False, "yes": True, "no": False, "1": True, "0": False}
    return words.get(text.lower())

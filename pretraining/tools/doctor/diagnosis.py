"""What `pretrain doctor` has found: rates, what is slow next to the others of its kind, and verdicts on all of it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from pretraining.estimate.devices import peak_tflops
from pretraining.tools.doctor.measure import DISK_READ, DISK_WRITE, CollectiveTime, Link, Rate
from pretraining.tools.doctor.verdicts import Check, Verdict, summary, table, worst_of

SLOW_BFLOAT16 = 1.5
BAD_TIMES = 3.0
LOW_SHARE_OF_PEAK = 0.4
"""Of the largest matrix product; sound devices reach 0.6 and more."""
SLOW_DISK_GIB = 0.1
SPEED = "speed"
Who = TypeVar("Who")


@dataclass(frozen=True)
class RankReport:
    """What one rank has measured.

    Attributes:
        facts: by name, in words.
        checks: verdicts on its machine and its device.
        rates: of its device, and of the disk where it is the one that measures that.
        clock: its machine's, in seconds, at the same moment on all ranks.
    """

    host: str
    facts: dict[str, str]
    checks: list[Check]
    rates: list[Rate]
    clock: float


@dataclass(frozen=True)
class Diagnosis:
    """What was measured on each rank and between them, and verdicts on all of it.

    Attributes:
        save_gib_per_second: of a checkpoint, by all ranks together; None = not measured.
    """

    ranks: list[RankReport]
    collectives: list[CollectiveTime]
    links: dict[Link, float]
    checks: list[Check]
    save_gib_per_second: float | None = None

    @property
    def verdict(self) -> Verdict:
        """The worst of all."""
        return worst_of(self.checks)


def check_speed(ranks: list[RankReport], links: dict[Link, float], factor: float) -> list[Check]:
    """A verdict for each rank or link that is slow next to the others of its kind; one of all where none is.

    What is more than `BAD_TIMES` slower is bad.
    """
    if len(ranks) == 1:
        return []
    bad = set(find_what_is_slow(ranks, links, max(factor, BAD_TIMES)))
    checks = [
        Check(
            SPEED, "bad" if sentence in bad else "look at", sentence, "leave it out, or look for what else runs there"
        )
        for sentence in find_what_is_slow(ranks, links, factor)
    ]
    return checks or [Check(SPEED, "good", f"no rank and no link is {factor:g} times slower than the others")]


def check_rates(rates: list[Rate], device: str) -> Iterator[Check]:
    """A verdict for what one rank has measured, where something is known to measure it by.

    Args:
        device: as facts name it.
    """
    by_name = {rate.name: rate for rate in rates}
    peak = peak_tflops(device)
    products = {name: rate.value for name, rate in by_name.items() if "matmul bfloat16" in name}
    if products:
        best = max(products.values())
        if peak is None:
            yield Check("matmul", "not known", f"{best:.3g} TFLOP/s in bfloat16; the peak of this device is not known")
        else:
            found = f"{best:.3g} TFLOP/s in bfloat16, {best / peak:.0%} of the peak of {peak:g}"
            is_low = best < LOW_SHARE_OF_PEAK * peak
            advice = "look at its clocks, and for other programs on it (nvidia-smi)" if is_low else ""
            yield Check("matmul", "look at" if is_low else "good", found, advice)
    for name in (DISK_WRITE, DISK_READ):
        if name in by_name:
            value = by_name[name].value
            is_low = value < SLOW_DISK_GIB
            advice = "keep data and checkpoints on another disk" if is_low else ""
            yield Check(name, "look at" if is_low else "good", f"{value:.3g} GiB/s", advice)


def find_what_is_slow(ranks: list[RankReport], links: dict[Link, float], factor: float) -> list[str]:
    """A sentence for each rank or link that is slow next to the others of its kind.

    Args:
        links: GiB/s of each.
        factor: how many times slower than the median of the others counts.
    """
    sentences = []
    for name, rates in _by_name(ranks).items():
        for rank, times in find_slow({rank: rate.value for rank, rate in rates.items()}, factor).items():
            rate = rates[rank]
            sentences.append(
                f"rank {rank} on {ranks[rank].host} is slow: {name} {rate.value:.3g} {rate.unit}, {times:.1f} times "
                "slower than the median of the others"
            )
    slow_ranks, slow_links = find_slow_links(links, factor)
    for rank, times in slow_ranks.items():
        sentences.append(
            f"rank {rank} on {ranks[rank].host} is slow: all its links are {times:.1f} times slower than the others"
        )
    for link, times in slow_links.items():
        hosts = (ranks[link.one].host, ranks[link.other].host)
        between = f"on {hosts[0]}" if link.is_inside else f"{hosts[0]} to {hosts[1]}"
        sentences.append(
            f"the link between rank {link.one} and rank {link.other} ({between}) is slow: {links[link]:.3g} GiB/s, "
            f"{times:.1f} times slower than the median of the others"
        )
    return sentences


def slow_bfloat16(rates: list[Rate], is_chosen: bool) -> Iterator[str]:
    """Says so where one rank multiplies in bfloat16 much slower than in float32, as a CPU that emulates it does.

    Args:
        rates: of the rank, with the matrix products of both.
        is_chosen: whether training computes in bfloat16 there without being told.
    """
    by_name = {rate.name: rate.value for rate in rates}
    both = [
        (value, by_name[name.replace("bfloat16", "float32")]) for name, value in by_name.items() if "bfloat16" in name
    ]
    times = statistics.median(float32 / max(bfloat16, 1e-9) for bfloat16, float32 in both)
    if times > SLOW_BFLOAT16:
        advice = "give --mixed_precision=false" if is_chosen else "as a run does unless --mixed_precision=true is given"
        yield f"bfloat16 is {times:.0f} times slower than float32 here: compute in float32, {advice}"


def find_slow(rates: Mapping[Who, float], factor: float) -> dict[Who, float]:
    """Those that are `factor` (above 1) times slower than the median of the others or worse, with how many times."""
    found = {}
    for who, rate in rates.items():
        others = [value for other, value in rates.items() if other != who]
        if others and rate * factor <= (median := statistics.median(others)):
            found[who] = median / rate if rate > 0 else float("inf")
    return found


def find_slow_links(rates: Mapping[Link, float], factor: float) -> tuple[dict[int, float], dict[Link, float]]:
    """Ranks with only slow links of a kind, and slow links of other ranks, with how many times.

    Links inside a machine are compared with each other, and so are those between machines.
    """
    ranks: dict[int, float] = {}
    links: dict[Link, float] = {}
    for is_inside in (True, False):
        kind = {link: rate for link, rate in rates.items() if link.is_inside == is_inside}
        slow = find_slow(kind, factor)
        for rank in sorted({rank for link in slow for rank in (link.one, link.other)}):
            own = [link for link in kind if rank in (link.one, link.other)]
            if len(own) > 1 and all(link in slow for link in own):
                ranks[rank] = max(ranks.get(rank, 0.0), min(slow[link] for link in own))
        links |= {link: times for link, times in slow.items() if link.one not in ranks and link.other not in ranks}
    return ranks, links


def as_object(diagnosis: Diagnosis) -> dict[str, Any]:
    """The diagnosis as JSON takes it: `slow` are sentences about speed, `warnings` the others to look at."""
    document = asdict(replace(diagnosis, links={}))
    document["links"] = [{**asdict(link), "gib_per_second": rate} for link, rate in diagnosis.links.items()]
    noticed = [check for check in diagnosis.checks if check.verdict in ("look at", "bad")]
    document["slow"] = [check.found for check in noticed if check.item == SPEED]
    document["warnings"] = [check.sentence for check in noticed if check.item != SPEED]
    document["verdict"] = diagnosis.verdict
    return document


def as_text(diagnosis: Diagnosis) -> str:
    """The diagnosis as tables, with verdicts at the end."""
    parts = (_machine, _rates, _collectives, _links, _verdicts)
    return "\n".join(line for part in parts for line in part(diagnosis))


def _machine(diagnosis: Diagnosis) -> Iterator[str]:
    facts = diagnosis.ranks[0].facts
    hosts = len({rank.host for rank in diagnosis.ranks})
    processes = f"{len(diagnosis.ranks)} processes" if len(diagnosis.ranks) > 1 else "1 process"
    yield f"{processes} on {f'{hosts} machines' if hosts > 1 else '1 machine'}; that of rank 0:"
    for name, value in facts.items():
        yield f"  {name:20} {value}"


def _rates(diagnosis: Diagnosis) -> Iterator[str]:
    peak = peak_tflops(diagnosis.ranks[0].facts["device"])
    yield ""
    yield f"{'each rank by itself':24} {'median':>9} {'slowest':>9} {'fastest':>9}"
    for name, rates in _by_name(diagnosis.ranks).items():
        values = {rank: rate.value for rank, rate in rates.items()}
        slowest = min(values, key=values.__getitem__)
        median = statistics.median(values.values())
        of_peak = f", {median / peak:.0%} of the peak of {peak:g}" if peak and "matmul bfloat16" in name else ""
        among = f" (slowest: rank {slowest})" if len(values) > 1 else ""
        first = next(iter(rates.values()))
        counted = f"; {first.counted}" if first.counted else ""
        numbers = f"{median:9.3g} {values[slowest]:9.3g} {max(values.values()):9.3g}"
        yield f"  {name:22} {numbers} {first.unit}{of_peak}{among}{counted}"


def _collectives(diagnosis: Diagnosis) -> Iterator[str]:
    if not diagnosis.collectives:
        return
    yield ""
    yield f"{'collectives of all ranks':24} {'size':>9} {'time':>9} {'bus':>9}"
    for each in diagnosis.collectives:
        milliseconds, rate = each.seconds * 1e3, each.bus_gib_per_second
        yield f"  {each.name:22} {_size(each.size):>9} {milliseconds:6.3f} ms {rate:9.3g} GiB/s"


def _links(diagnosis: Diagnosis) -> Iterator[str]:
    for is_inside, where in ((True, "inside machines"), (False, "between machines")):
        rates = [rate for link, rate in diagnosis.links.items() if link.is_inside == is_inside]
        if rates:
            yield ""
            yield f"{'links ' + where:24} {'median':>9} {'slowest':>9} {'fastest':>9}"
            numbers = f"{statistics.median(rates):9.3g} {min(rates):9.3g} {max(rates):9.3g}"
            yield f"  {'pairs of ranks: ' + str(len(rates)):22} {numbers} GiB/s each way"


def _verdicts(diagnosis: Diagnosis) -> Iterator[str]:
    yield ""
    yield "verdicts"
    yield from table(diagnosis.checks)
    yield ""
    yield from summary(diagnosis.checks)


def _by_name(ranks: list[RankReport]) -> dict[str, dict[int, Rate]]:
    """What was measured: name, then rank."""
    found: dict[str, dict[int, Rate]] = {}
    for number, rank in enumerate(ranks):
        for rate in rank.rates:
            found.setdefault(rate.name, {})[number] = rate
    return found


def _size(size: int) -> str:
    return f"{size / 2**20:g} MiB" if size >= 2**20 else f"{size / 2**10:g} KiB"

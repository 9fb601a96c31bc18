"""What `pretrain doctor` has found: what is slow next to the others of its kind, as tables or as an object."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from pretraining.estimate.devices import peak_tflops
from pretraining.tools.doctor.measure import CollectiveTime, Link, Rate

SLOW_BFLOAT16 = 1.5
Who = TypeVar("Who")


@dataclass(frozen=True)
class RankReport:
    """What one rank has measured.

    Attributes:
        facts: by name, in words.
        warnings: what is bad there, in sentences.
        rates: of its device, and of the disk where it is the one that measures that.
        clock: its machine's, in seconds, at the same moment on all ranks.
    """

    host: str
    facts: dict[str, str]
    warnings: list[str]
    rates: list[Rate]
    clock: float


@dataclass(frozen=True)
class Diagnosis:
    """What was measured on each rank and between them, and what stands out, in sentences."""

    ranks: list[RankReport]
    collectives: list[CollectiveTime]
    links: dict[Link, float]
    slow: list[str]
    warnings: list[str]


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
    """The diagnosis as JSON takes it."""
    document = asdict(replace(diagnosis, links={}))
    document["links"] = [{**asdict(link), "gib_per_second": rate} for link, rate in diagnosis.links.items()]
    return document


def as_text(diagnosis: Diagnosis) -> str:
    """The diagnosis as tables, with what stands out at the end."""
    parts = (_machine, _rates, _collectives, _links, _conclusion)
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


def _conclusion(diagnosis: Diagnosis) -> Iterator[str]:
    yield ""
    yield from (f"slow: {sentence}" for sentence in diagnosis.slow)
    yield from (f"warning: {sentence}" for sentence in diagnosis.warnings)
    if not diagnosis.slow and not diagnosis.warnings:
        yield "nothing stands out"


def _by_name(ranks: list[RankReport]) -> dict[str, dict[int, Rate]]:
    """What was measured: name, then rank."""
    found: dict[str, dict[int, Rate]] = {}
    for number, rank in enumerate(ranks):
        for rate in rank.rates:
            found.setdefault(rate.name, {})[number] = rate
    return found


def _size(size: int) -> str:
    return f"{size / 2**20:g} MiB" if size >= 2**20 else f"{size / 2**10:g} KiB"

"""Tokens/s of the loader against others, on the same documents and on one core.

    pip install mosaicml-streaming datasets          in an environment of its own: it takes older packages
    git clone https://github.com/foundation-model-stack/fms-fsdp
    python -m scripts.benchmark.compare.against_loaders --fms_fsdp=fms-fsdp

Every contender runs in a process of its own, without workers, and makes batches of 8 sequences of 4096 tokens and one
more; they take turns of a second on one core. Each has the documents in the form that suits it, in the page cache: the
project and `datasets` read the same Arrow files, fms-fsdp files with a record batch for every document, and Mosaic
Streaming MDS shards of documents or, as its users make them, of rows that are packed already, which leaves it nothing
to do but to read. What is not installed is left out.

The project also says where documents begin; the others do not.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from scripts.benchmark.common import (
    Number,
    announce,
    announce_rest,
    check_folder,
    check_new_folder,
    end_if_checked,
    flag_parser,
    print_table,
    spread,
)
from scripts.benchmark.compare.rival_loaders import CONTENDERS, Batches, installed_packages, prepare
from scripts.benchmark.documents import use_one_core, write_documents

MEAN_TOKENS = (600, 60)
TURN_SECONDS = 1.0


def race(contenders: list[str], folder: Path, name: str, rounds: int) -> dict[str, list[float]]:
    """Tokens a second of every contender, turn by turn."""
    processes = multiprocessing.get_context("spawn")
    ends: dict[str, Connection] = {}
    for contender in contenders:
        ends[contender], other_end = processes.Pipe()
        processes.Process(target=_contend, args=(contender, folder, name, other_end), daemon=True).start()
        other_end.close()
    rates: dict[str, list[float]] = {contender: [] for contender in contenders}
    for contender, end in ends.items():
        _receive(contender, end)  # it is warm
    print(f"\nracing    {rounds} rounds", flush=True)
    announce_rest(rounds * len(contenders) * TURN_SECONDS)
    for _ in range(rounds):
        for contender, end in ends.items():
            end.send(True)
            rates[contender].append(_receive(contender, end))
    for end in ends.values():
        end.close()
    for child in multiprocessing.active_children():
        child.join()
    return rates


def _receive(contender: str, end: Connection) -> float:
    try:
        rate: float = end.recv()
    except EOFError:
        sys.exit(f"'{contender}' ended early: its error stands above")
    return rate


def _contend(contender: str, folder: Path, name: str, connection: Connection) -> None:
    """A contender's process: warms up, and then reads for a turn whenever it is asked to."""
    use_one_core()
    batches = CONTENDERS[contender][0](folder, name)
    _read(batches)
    connection.send(0.0)
    try:
        while connection.recv():
            connection.send(_read(batches))
    except EOFError:  # the race is over
        return


def _read(batches: Batches) -> float:
    """Reads for a turn; tokens a second."""
    tokens, began = 0, time.perf_counter()
    while time.perf_counter() < began + TURN_SECONDS:
        tokens += next(batches)
    return tokens / (time.perf_counter() - began)


def main() -> None:
    parser = flag_parser(
        "The loader against others.",
        tokens=Number(100_000_000, "of each dataset", least=10_000_000),
        rounds=Number(9, "turns that count"),
    )
    parser.add_argument("--fms_fsdp", type=Path, help="a checkout of github.com/foundation-model-stack/fms-fsdp")
    parser.add_argument("--folder", type=Path, help="keep the made-up documents here (default: a temporary folder)")
    flags = parser.parse_args()
    check_folder("fms_fsdp", flags.fms_fsdp)
    check_new_folder("folder", flags.folder)
    end_if_checked(flags)
    if flags.fms_fsdp is not None:  # for this process and for those that it starts
        sys.path.insert(0, str(flags.fms_fsdp.absolute()))
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    use_one_core()
    announce(flags)
    packages = installed_packages()
    contenders = [name for name, (_, package) in CONTENDERS.items() if not package or package in packages]
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        folder = flags.folder or Path(temporary)
        for mean in MEAN_TOKENS:
            write_documents(folder / f"mean{mean}", mean, flags.tokens)
            prepare(folder, f"mean{mean}", packages)
            rates = race(contenders, folder, f"mean{mean}", flags.rounds)
            own = rates[contenders[0]]
            rows = [
                (
                    contender,
                    *spread([rate / 1e6 for rate in each], ".1f"),
                    spread([a / b for a, b in zip(own, each, strict=True)], ".1f")[0],
                )
                for contender, each in rates.items()
            ]
            header = (f"documents of {mean} tokens", "M tokens/s", "quartiles", "project, 8 / it")
            print_table(header, rows)


if __name__ == "__main__":
    main()

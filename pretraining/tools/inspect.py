"""`pretrain inspect`: the samples that a step trains on, found without training.

    settings, data state of a checkpoint -> loader of training -> slots of a step -> spans of documents

No earlier step is visited, so every step takes the same time. Steps count from 1, as in reports: step N is the batch of
update N, which the loader (counting from 0) calls N - 1.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pretraining.checkpoint.run_folder import checkpoints_of_run, newest_run_path, run_of
from pretraining.checkpoint.start_point import find_newest, find_start, named_checkpoint
from pretraining.config.assignments import COMMAND_LINE, Assignment
from pretraining.config.batch_sizes import BatchSizes
from pretraining.config.command_line import assign
from pretraining.config.read import read, read_values
from pretraining.config.recipe_files import parse_recipe
from pretraining.config.strategies import DimSizes, unsharded_sizes
from pretraining.config.training import CheckpointConfig
from pretraining.config.variants import resolve_shape
from pretraining.data.batch_reader import BatchReader, Slots
from pretraining.data.dataset import build_indices, build_loader, open_datasets, warn_about_datasets
from pretraining.data.prepared import recorded_tokenizer
from pretraining.data.samples import OpenedDataset, OpenedDatasets
from pretraining.data.sampling.mixture import count_numbers
from pretraining.data.sampling.token_stream import Spans
from pretraining.data.storage.dataset_files import list_datasets
from pretraining.data.tokenizer import load_tokenizer
from pretraining.errors import CheckpointError, ConfigError, DataError
from pretraining.files import is_address
from pretraining.launch.terminal import print_text, showing_through
from pretraining.text import count_of, format_table
from pretraining.tools.command_settings import InspectConfig
from pretraining.tools.translate.translate import translate
from pretraining.train.complete import complete

log = logging.getLogger(__name__)

_WHERE_FROM = ("resume_from_checkpoint", "ckpt_load_path")
_OF_A_START = ("resume_from_checkpoint", "init_from", "tokenizer_path")  # `complete` finds the tokenizer again
_IDS_SHOWN = 12
_CHARACTERS_SHOWN = 200


def inspect_command(given: Sequence[Assignment]) -> None:
    """Print the samples of steps of the run that `train` would start or resume, or of a named checkpoint.

    Args:
        given: the command line. A path as the first word is a run or checkpoint, unless it ends like a recipe.

    Raises:
        PretrainError: unusable settings, data or checkpoint.
    """
    if given and not given[0].name:
        given = [replace(given[0], name="ckpt_load_path"), *given[1:]]
    with showing_through(partial(print, file=sys.stderr, flush=True)):  # stdout is for the answer
        _inspect_given(translate(InspectConfig, given))


def _inspect_given(given: Sequence[Assignment]) -> None:
    typed = read_values(InspectConfig, given)
    if typed.problems:
        raise ConfigError(typed.problems)
    request, source = (
        typed.values[name] if typed.values.get(name) and typed.chosen[name].source == COMMAND_LINE else None
        for name in _WHERE_FROM
    )
    if source is not None and is_address(source):
        from pretraining.checkpoint.copies import local_view

        with local_view(source, with_files=False) as run:
            _inspect_given(_load_from(given, str(run), request))
        return
    named = None if typed.values.get("weights_only") else source or request  # with weights_only, a new run starts
    if request is not None:
        save_path = typed.values.get("ckpt_save_path", CheckpointConfig().ckpt_save_path)
        checkpoint = _find_named(source or save_path, request, is_required=source is not None)
        if checkpoint is not None:
            given, named = _load_from(given, checkpoint), checkpoint
    # The manifest alone determines the samples: a checkpoint with damaged tensors can be inspected.
    if named is None:
        config = read(InspectConfig, given).config
        path = config.checkpoint.ckpt_save_path
        start = find_start(replace(config.checkpoint, ckpt_save_path=path and newest_run_path(path)))
    else:
        start = find_newest(Path(newest_run_path(named)))
        recorded = parse_recipe(start.manifest.config, f"config of {start.path}")
        settings = [assignment for assignment in recorded if assignment.section_and_name[1] not in _OF_A_START]
        config = read(InspectConfig, [*settings, *given]).config
    config = complete(config, start)
    # A run that takes only the weights starts its data from the beginning.
    manifest = start.manifest if start and not start.weights_only else None
    state, size = (manifest.data, manifest.global_batch_size) if manifest else (None, None)
    inspect(config, state, size)


def _load_from(given: Sequence[Assignment], path: str, request: str | None = None) -> list[Assignment]:
    """Replace what the command line says about the start point."""
    others = [word for word in given if word.source != COMMAND_LINE or word.section_and_name[1] not in _WHERE_FROM]
    where_from = {"ckpt_load_path": path} | ({} if request is None else {"resume_from_checkpoint": request})
    return [*others, *assign(where_from)]


def _find_named(run: str | None, request: str, *, is_required: bool) -> str | None:
    """Return the checkpoint with this step, name or path in a run, as `train` finds it."""
    if run is None:
        return None
    folder = run_of(Path(newest_run_path(run)))
    path = named_checkpoint(folder, request)
    if path is None and is_required:
        names = ", ".join(checkpoint.path.name for checkpoint in checkpoints_of_run(folder)) or "none"
        raise CheckpointError(
            f"--resume_from_checkpoint={request} is no checkpoint of the run in {folder}, which holds {names}"
        )
    return None if path is None else str(path)


def inspect(config: InspectConfig, state: Mapping[str, Any] | None = None, restored_batch: int | None = None) -> None:
    """Print the samples of steps of a run.

    Args:
        state, restored_batch: data state and global batch size of the checkpoint that the run resumes from.

    Raises:
        ConfigError: contradictory settings.
        DataError: data that cannot be read, or whose order differs from that of the checkpoint.
    """
    options, inspector = config.inspect, _open(config, state, restored_batch)
    if options.steps is None:
        _print_slots(config, inspector)
        return
    first, last = options.step_range
    summaries = inspector.summary(first, last)
    if options.json:
        lines = [json.dumps({"first_step": first, "last_step": last, **asdict(summary)}) for summary in summaries]
    else:
        samples, tokens = (sum(getattr(summary, name) for summary in summaries) for name in ("samples", "tokens"))
        table = [
            ("dataset", "asked", "realised", "samples", "tokens", "passes"),
            *(summary.cells for summary in summaries),
        ]
        head = f"steps {first:,} to {last:,}: {count_of(samples, 'sample')}, {tokens:,} tokens"
        lines = [head, *format_table(table, right=range(1, 6))]
    print_text("\n".join(lines))


def _open(config: InspectConfig, state: Mapping[str, Any] | None, restored_batch: int | None) -> Inspector:
    """Return an Inspector of the batches that training would read."""
    dims, batch = _dims(config), config.batch
    size = batch.global_batch_size or restored_batch  # same precedence as `resolve_batch_sizes`
    if size is None:
        size = batch.batch_size * (batch.grad_accum_steps or 1) * dims.data
        if config.inspect.world_size is None:
            text = "A step is taken as %d sequences, the batch of one GPU: set --world_size or --global_batch_size."
            log.info(text, size)
    opened = None
    if not config.data.use_dummy_dataset:
        opened = open_datasets(build_indices(list_datasets(config.data), config.data), config.data)
        warn_about_datasets(opened, config.data)
    vocab_size = resolve_shape(config.model).vocab_size
    loader = build_loader(opened, config.data, _plan_of(size, dims), 0, config.run.seed, vocab_size)
    if state is not None:
        loader.load_state_dict(state)  # raises if the order differs
    quarantine = config.data.bad_documents == "quarantine"
    return Inspector(loader.reader, opened, config.data.seq_length, quarantine=quarantine)


def _print_slots(config: InspectConfig, inspector: Inspector) -> None:
    options, dims, step = config.inspect, _dims(config), config.inspect.step
    if step is None:
        assert options.sample_id is not None  # the rules ask for one of them
        step = inspector.step_of_sample(options.sample_id)
    size = inspector.global_batch_size(step)
    share = None if options.rank is None else _plan_of(size, dims).share(dims.data_rank_of(options.rank))
    decode, tokenizer_path = None, recorded_tokenizer(config.data)
    if options.text and tokenizer_path is None:
        raise ConfigError("--text needs the tokenizer of the data: give --tokenizer_path")
    if tokenizer_path is not None and (options.text or (options.tokens and not options.json)):
        decode = load_tokenizer(tokenizer_path).decode
    if not options.json:
        place = f"rank {options.rank} of {dims.world}" if options.rank is not None else "all ranks"
        print_text(heading(step, place, size, config.data.seq_length))
    shown = 0
    for slot in inspector.slots(step, share, options.sample_id, options.tokens or options.text):
        shown += 1
        if options.json:
            texts = {"text": decode(slot.ids)} if decode is not None and slot.ids is not None else {}
            print_text(json.dumps({**slot.document(with_ids=options.tokens), **texts}))
        else:
            print_text("\n".join(slot.describe(decode, whole=options.text)))
    if options.sample_id is not None and not shown:
        step = inspector.step_of_sample(options.sample_id)
        raise ConfigError(f"--sample_id={options.sample_id} is in step {step}: drop --step and --rank")


def heading(step: int, place: str, slots: int, seq_length: int) -> str:
    """Return the line above the slots of a step; `place` names the ranks."""
    return f"step {step}, {place}: the global batch has {count_of(slots, 'slot')} of {seq_length} + 1 tokens"


def _dims(config: InspectConfig) -> DimSizes:
    return unsharded_sizes(config.parallel, config.inspect.world_size or config.parallel.context_parallel_size)


def _plan_of(size: int, dims: DimSizes) -> BatchSizes:
    """Return how ranks share a global batch; micro-batches do not change the slots of a rank."""
    return BatchSizes(size, -(-size // dims.data), 1, dims.data)


class Inspector:
    """A view of the batches of a run; steps count from 1.

    With `quarantine`, a sample that cannot be read is marked; otherwise it is an error.
    """

    def __init__(
        self, reader: BatchReader, opened: OpenedDatasets | None, seq_length: int, quarantine: bool = False
    ) -> None:
        self._reader = reader
        self._quarantine = quarantine
        self._datasets = {dataset.files.name: dataset for dataset in opened.datasets} if opened else {}
        self._seq_length = seq_length

    def step_of_sample(self, sample_id: int) -> int:
        """Return the step that trains on a sample."""
        return self._reader.mixture.step_of_sample(sample_id) + 1

    def global_batch_size(self, step: int) -> int:
        """Return the number of slots of a step, which may differ between phases of a run."""
        return self._reader.mixture.global_batch_size(step - 1)

    def slots(
        self, step: int, share: tuple[int, int] | None = None, sample_id: int | None = None, tokens: bool = False
    ) -> Iterator[InspectedSlot]:
        """Yield the slots of a step, in the order in which ranks take them.

        Args:
            share: slots [begin, end) to yield; None = all.
            sample_id: the only sample to yield.
            tokens: read the token ids.
        """
        slots = self._reader.slots(step - 1)
        begin, end = share or (0, len(slots.samples))
        for slot in range(begin, end):
            if sample_id is None or slots.samples[slot] == sample_id:
                yield self._slot(step, slots, slot, tokens)

    def summary(self, first: int, last: int) -> list[DatasetSummary]:
        """Summarize the samples of each dataset in steps `first` to `last`, both included."""
        mixture = self._reader.mixture
        taken = list(mixture.taken(first - 1, last))
        phase_samples = [count_numbers(*ranges.values()) for _, ranges in taken]
        before, after = (mixture.positions_before_step(step) for step in (first - 1, last))
        summaries = []
        for name in (source.name for source in self._reader.sources):
            asked = sum(
                count * phase.weights.get(name, 0) / sum(phase.weights.values())
                for count, (phase, _) in zip(phase_samples, taken, strict=True)
            )
            samples, total = sum(count_numbers(ranges.get(name, ())) for _, ranges in taken), sum(phase_samples)
            size = self._datasets[name].pass_tokens("train") if name in self._datasets else None
            passes = [count[name] * self._seq_length / size for count in (before, after)] if size else None
            tokens = samples * self._seq_length
            summaries.append(DatasetSummary(name, asked / total, samples / total, samples, tokens, passes))
        return summaries

    def _slot(self, step: int, slots: Slots, slot: int, tokens: bool) -> InspectedSlot:
        source = self._reader.sources[int(slots.datasets[slot])]
        spans = source.spans(slots.shards[slot : slot + 1], slots.numbers[slot : slot + 1])
        ids = problem = None
        if tokens:
            row = np.empty((1, self._seq_length + 1), dtype=np.int32)
            try:
                source.read(spans, row, np.zeros(1, dtype=np.int64))
                ids = tuple(row[0, : spans.row_tokens[0]].tolist())
            except DataError as error:
                if not self._quarantine:
                    raise
                problem = str(error)
        dataset = self._datasets.get(source.name)
        places = tuple(_places(dataset, spans)) if dataset else ()
        return InspectedSlot(step, slot, int(slots.samples[slot]), source.name, places, ids, problem)


def _places(dataset: OpenedDataset, spans: Spans) -> Iterator[SpanPlace]:
    """Yield the place on disk of each piece of a sample."""
    files = dataset.index.files_of(spans.documents)
    rows = spans.documents - dataset.index.first_documents[files]
    columns = (column.tolist() for column in (files, rows, spans.starts, spans.lengths))
    for file, row, start, length in zip(*columns, strict=True):
        yield SpanPlace(dataset.files.path(file), row, start, length)


@dataclass(frozen=True)
class SpanPlace:
    """A piece of a document in a sample.

    Attributes:
        file: absolute path.
        start: first token of the piece in the document as trained on: with `bos_token`, without stripped tokens.
        length: tokens of the piece, with the virtual separator of the document.
    """

    file: str
    row: int
    start: int
    length: int


@dataclass(frozen=True)
class InspectedSlot:
    """A slot of a global batch.

    Attributes:
        slot: index in the global batch.
        sample_id: global index of the sample.
        spans: pieces in order, S + 1 tokens, or fewer with packing; empty for dummy data.
        ids: tokens of the spans; None if not requested or not readable.
        problem: why the tokens cannot be read, if the sample is quarantined.
    """

    step: int
    slot: int
    sample_id: int
    dataset: str
    spans: tuple[SpanPlace, ...]
    ids: tuple[int, ...] | None
    problem: str | None = None

    def document(self, with_ids: bool = True) -> dict[str, Any]:
        """Return the JSON object of `--json`. Its format is an interface: fields are added, never renamed."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return {name: value for name, value in known.items() if with_ids or name != "ids"}

    def describe(self, decode: Callable[[Sequence[int]], str] | None, whole: bool = False) -> Iterator[str]:
        """Yield lines with the place of each piece and the two ends of its text (without `decode`, of its ids).

        Args:
            whole: yield the whole text, line by line.
        """
        yield f"slot {self.slot}  sample {self.sample_id}  dataset {self.dataset}"
        if self.problem is not None:
            yield f"  quarantined, no labels: {self.problem}"
        at = 0
        for span in self.spans:
            yield f"  {span.file}  row {span.row}  tokens {span.start}-{span.start + span.length - 1}"
            if self.ids is not None:
                yield from _content(self.ids[at : at + span.length], decode, whole)
            at += span.length
        if not self.spans and self.ids is not None:
            yield from _content(self.ids, decode, whole)


@dataclass(frozen=True)
class DatasetSummary:
    """The samples of a dataset in steps A to B.

    Attributes:
        asked, realised: fraction by weight, and fraction of the samples.
        tokens: S per sample, padding included.
        passes: passes over the dataset done before step A, and after step B; None for endless data.
    """

    dataset: str
    asked: float
    realised: float
    samples: int
    tokens: int
    passes: list[float] | None

    @property
    def cells(self) -> tuple[str, ...]:
        """Row of the table."""
        passes = f"{self.passes[0]:.3f} to {self.passes[1]:.3f}" if self.passes else ""
        shares = (f"{share:.4%}" for share in (self.asked, self.realised))
        return self.dataset, *shares, f"{self.samples:,}", f"{self.tokens:,}", passes


def _content(ids: Sequence[int], decode: Callable[[Sequence[int]], str] | None, whole: bool) -> Iterator[str]:
    """Yield the text of ids line by line if `whole`, else one line: their quoted text, or the ids, shortened."""
    if decode is not None and whole:
        yield from (f"    {line}" for line in decode(ids).split("\n"))
        return
    content, most = (ids, _IDS_SHOWN) if decode is None else (decode(ids), _CHARACTERS_SHOWN)
    ends = [content] if len(content) <= most else [content[: most // 2], content[-most // 2 :]]
    texts = (json.dumps(end, ensure_ascii=False) if isinstance(end, str) else " ".join(map(str, end)) for end in ends)
    yield "    " + " … ".join(texts)

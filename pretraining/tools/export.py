"""`pretrain export`: conversion of a checkpoint for other programs.

    checkpoint, sharded or full -> whole tensors, one at a time -> hf    config.json, safetensors, tokenizer, README
                                                                -> full  four .pt files and a manifest
                                                                -> gguf  one file for llama.cpp

Export needs one process, no GPU, and the memory of one tensor (--format=full: of all tensors). The output folder is
renamed into place when it is complete. The Hugging Face hub shows README.md, so it holds no paths. It names a license
only if the run began with an imported model that has one.
"""

from __future__ import annotations

import html
import json
import logging
import math
import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pretraining.checkpoint.completeness import check_finite
from pretraining.checkpoint.headers import StoredTensors
from pretraining.checkpoint.hf_import import origin_file, read_origin
from pretraining.checkpoint.manifest import FULL_FILES, MANIFEST, Manifest, shape_of
from pretraining.checkpoint.pt_files import check_host_memory, write_full
from pretraining.checkpoint.reader import open_whole_model, read_tensor
from pretraining.checkpoint.run_folder import run_of
from pretraining.checkpoint.start_point import CheckpointRef, find_newest
from pretraining.checkpoint.writer import Kinds, size_of, write_tensors
from pretraining.config.recipe_files import settings_in
from pretraining.config.training import TrainConfig
from pretraining.config.variants import LlamaShape
from pretraining.data.prepared import recorded_tokenizer
from pretraining.data.tokenizer import Tokenizer, load_tokenizer
from pretraining.errors import CheckpointError, ConfigError, DataError
from pretraining.estimate.costs import parameter_count
from pretraining.files import atomic_folder, exists, is_address, output_errors, write_flushed, write_json
from pretraining.launch.terminal import print_text
from pretraining.model.hf import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    INDEX_FILE,
    ORIGIN_FILE,
    WEIGHTS_FILE,
    config_document,
    generation_document,
    parameter_shapes,
    token_ids,
)
from pretraining.text import count_of, format_bytes, parse_bytes
from pretraining.tools.command_settings import ExportConfig
from pretraining.tools.gguf_file import check_supported, write_gguf

log = logging.getLogger(__name__)


def export(config: ExportConfig) -> None:
    """Convert the newest good checkpoint at `config.ckpt_load_path`.

    Raises:
        CheckpointError: no checkpoint, a damaged one, or an output folder that cannot be written.
        ConfigError, DataError: unusable settings or tokenizer.
    """
    if is_address(config.ckpt_load_path):
        from pretraining.checkpoint.copies import local_view

        with local_view(config.ckpt_load_path, with_files=True) as run:
            export(replace(config, ckpt_load_path=str(run)))
        return
    checkpoint = find_newest(Path(config.ckpt_load_path))
    for damaged in checkpoint.damaged:
        log.info("%s: skipped", damaged)
    tensors = open_whole_model(checkpoint.path, checkpoint.manifest)
    write = {"hf": _export_hf, "full": _export_full, "gguf": _export_gguf}[config.format]
    write(config, checkpoint, tensors)


class _Documents(NamedTuple):
    """Documents beside the weights: config.json, generation_config.json and the tokenizer."""

    settings: TrainConfig
    config: dict[str, Any]
    generation: dict[str, Any]
    tokenizer: Tokenizer | None


def _describe(config: ExportConfig, checkpoint: CheckpointRef, origin: Mapping[str, Any]) -> _Documents:
    """Return the documents of an export; `origin` is that of the imported model, if any."""
    manifest, shape = checkpoint.manifest, shape_of(checkpoint.manifest)
    settings = settings_in(manifest.config, f"config of {checkpoint.path}")
    tokenizer = _find_tokenizer(config, checkpoint.path, settings, shape)
    is_trained = bool(manifest.facts_of_data)
    context = max(settings.data.seq_length if is_trained else 0, shape.max_position_embeddings)
    data, kept, generation = settings.data, origin.get("config", {}), origin.get("generation_config", {})
    tokens, given = token_ids({**kept, **origin}), token_ids(generation)
    bos = _choose_token("bos_token_id", data.bos, tokens)
    eos = _choose_token("eos_token_id", data.sep, tokens, None if tokenizer is None else tokenizer.end_of_text)
    end = _first_known(data.sep, *_listed(eos))
    # Chat models end a text with several tokens: those of the imported model stay beside the run's.
    ends = _listed(given.get("eos_token_id", tokens.get("eos_token_id", eos)))
    ends = ends if end is None or end in ends else [end, *ends]
    pad = _first_known(tokens.get("pad_token_id"), given.get("pad_token_id"))
    if tokenizer is not None:
        pad = _first_known(tokenizer.pad_token, pad, end)
    if pad is not None and pad >= shape.vocab_size:  # transformers builds no embedding with such a padding row
        pad = end
    document = config_document(shape, config.dtype, context, bos, eos, pad, kept)
    begin = None if tokenizer is None else tokenizer.begin_of_text
    if begin is not None and data.bos is None and is_trained:
        log.warning(
            "the tokenizer puts token %d before every text, but the run had no bos_token: unless the token files "
            "contain it, the model has never seen it. Call tokenizers of transformers with add_special_tokens=False",
            begin,
        )
    tokenizer = None if tokenizer is None else tokenizer.with_settings(context, pad)
    return _Documents(settings, document, generation_document(bos, ends, pad, generation), tokenizer)


def _export_hf(config: ExportConfig, checkpoint: CheckpointRef, tensors: StoredTensors) -> None:
    manifest, origin = checkpoint.manifest, read_origin(checkpoint.path)
    settings, document, generation, tokenizer = _describe(config, checkpoint, origin)
    dtype = getattr(torch, config.dtype)
    kinds = {name: (dtype, tuple(size)) for name, size in parameter_shapes(shape_of(manifest)).items()}
    files, output = plan_files(kinds, parse_bytes(config.max_shard_size)), Path(config.output_path)
    total = sum(size_of(*kind) for kind in kinds.values())
    with atomic_folder(output, "--output_path", total) as folder:
        for name, content in files.items():
            weights = (_read_finite(checkpoint.path, tensors, tensor).to(dtype) for tensor in content)
            write_tensors(folder / name, content, weights)
        if len(files) > 1:
            write_json(folder / INDEX_FILE, _index_document(files))
        write_json(folder / CONFIG_FILE, document)
        write_json(folder / GENERATION_CONFIG_FILE, generation)
        if tokenizer is not None:
            tokenizer.save(folder)
        card = _model_card(output.name, manifest, settings, config.dtype, origin, tokenizer is not None)
        write_flushed(folder / "README.md", card)
    print_text(f"{output}: step {manifest.step} of {checkpoint.path}, {config.dtype}, {format_bytes(total)}")
    print_text(f"  weights    {count_of(len(files), 'safetensors file')}")
    print_text(f"  load it    AutoModelForCausalLM.from_pretrained({str(output)!r})")


def _export_gguf(config: ExportConfig, checkpoint: CheckpointRef, tensors: StoredTensors) -> None:
    shape, output = shape_of(checkpoint.manifest), Path(config.output_path)
    _, document, _, tokenizer = _describe(config, checkpoint, read_origin(checkpoint.path))
    split = check_supported(shape, tokenizer, document)
    assert tokenizer is not None  # checked
    unfinished = output.with_name(f".{output.name}.partial")
    if exists(output):
        raise CheckpointError("it exists already. Remove it, or give another --output_path", path=output)
    try:
        with output_errors(output, problem=CheckpointError):
            output.parent.mkdir(parents=True, exist_ok=True)
            read = partial(_read_finite, checkpoint.path, tensors)
            write_gguf(unfinished, shape, document, tokenizer, split, getattr(torch, config.dtype), read)
            unfinished.replace(output)
    finally:
        unfinished.unlink(missing_ok=True)
    print_text(f"{output}: step {checkpoint.manifest.step} of {checkpoint.path}, {config.dtype}, for llama.cpp")


def _read_finite(folder: Path, tensors: StoredTensors, name: str) -> torch.Tensor:
    return check_finite(folder, name, read_tensor(tensors, name))


def _first_known(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _listed(ids: Any) -> list[int]:
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def _choose_token(name: str, of_run: int | None, imported: Mapping[str, Any], default: int | None = None) -> Any:
    """Return a token of the run, else of the imported model, else a default; log one that is replaced.

    A list of the imported model stays if it holds the run's token.
    """
    theirs = imported.get(name)
    if of_run is not None and of_run in _listed(theirs):
        return theirs
    if None not in (of_run, theirs):
        log.info("%s is %s, that of the run, in place of %s of the imported model", name, of_run, theirs)
    return _first_known(of_run, theirs, default)


def _export_full(config: ExportConfig, checkpoint: CheckpointRef, tensors: StoredTensors) -> None:
    parameters = parameter_shapes(shape_of(checkpoint.manifest))
    total = sum(size_of(chunks[0].dtype, tensors.shape(name)) for name, chunks in tensors.chunks.items())
    check_host_memory(total, "Export on a machine with more")
    output = Path(config.output_path)
    with atomic_folder(output, "--output_path", total) as folder:
        held = {name: read_tensor(tensors, name) for name in tensors.chunks}
        for name in parameters:
            check_finite(checkpoint.path, name, held[name])
        files = write_full(folder, held, checkpoint.manifest)
        write_json(folder / MANIFEST, replace(checkpoint.manifest, files=files).document())
        if (origin := origin_file(checkpoint.path)) is not None:
            shutil.copyfile(origin, folder / ORIGIN_FILE)
    print_text(f"{output}: step {checkpoint.manifest.step} of {checkpoint.path}, {format_bytes(total)}")
    print_text("  files      " + ", ".join(FULL_FILES))
    print_text(f"  resume     pretrain train {shlex.quote(f'--ckpt_load_path={output}')} …")


def _find_tokenizer(config: ExportConfig, path: Path, settings: TrainConfig, shape: LlamaShape) -> Tokenizer | None:
    """Return the tokenizer of `config`, else of the run; None, with a warning, if there is none.

    Raises:
        ConfigError, DataError: the tokenizer of `config` cannot be read, or has tokens without a row in the model.
    """
    named = config.tokenizer_path or recorded_tokenizer(settings.data, run_of(path.parent))
    try:
        tokenizer = None if named is None else load_tokenizer(named)
        if tokenizer is not None and not tokenizer.fits(shape.vocab_size):
            sizes = f"{tokenizer.vocab_size} entries, but the model has {shape.vocab_size} rows"
            raise ConfigError(f"the tokenizer of {named} has {sizes}: give that of the data, --tokenizer_path")
    except (ConfigError, DataError) as error:
        if config.tokenizer_path is not None:
            raise
        log.warning("%s", error)
        tokenizer = None
    if tokenizer is None:
        log.warning("no tokenizer is exported: set --tokenizer_path to include one")
    return tokenizer


def plan_files(kinds: Kinds, max_bytes: int) -> dict[str, Kinds]:
    """Return the tensors of each file, by file name; a tensor larger than `max_bytes` gets a file of its own."""
    files: list[dict[str, Any]] = [{}]
    used = 0
    for name, kind in kinds.items():
        used += size_of(*kind)
        if files[-1] and used > max_bytes:
            files.append({})
            used = size_of(*kind)
        files[-1][name] = kind
    if len(files) == 1:
        return {WEIGHTS_FILE: files[0]}
    return {f"model-{n:05d}-of-{len(files):05d}.safetensors": content for n, content in enumerate(files, start=1)}


def _index_document(files: dict[str, Kinds]) -> dict[str, Any]:
    kinds = [kind for content in files.values() for kind in content.values()]
    parameters, size = sum(math.prod(shape) for _, shape in kinds), sum(size_of(*kind) for kind in kinds)
    return {
        "metadata": {"total_parameters": parameters, "total_size": size},
        "weight_map": {name: file for file, content in files.items() for name in content},
    }


def _model_card(
    name: str, manifest: Manifest, settings: TrainConfig, dtype: str, origin: Mapping[str, Any], has_tokenizer: bool
) -> str:
    """Return the README.md of a model: facts, and how to load it; config.json beside it has the shape.

    Args:
        origin: license and base_model of the imported model that the run began with, if known.
    """
    shape, known = shape_of(manifest), {key: origin[key] for key in ("license", "base_model") if origin.get(key)}
    metadata = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": [shape.model_family],
        **known,
    }
    facts = {"family": shape.model_family, "parameters": f"{parameter_count(shape):,} in {dtype}", **known}
    if manifest.data:
        facts |= _training_facts(manifest, settings)
    if manifest.average:
        facts["average"] = " + ".join(f"{part['weight']:.4g} x step {part['step']}" for part in manifest.average["of"])
    classes = ["AutoModelForCausalLM", *["AutoTokenizer"] * has_tokenizer]
    lines = [
        "---",
        *(f"{key}: {json.dumps(value)}" for key, value in metadata.items()),
        "---",
        f"\n# {_escape(name)}\n",
        *(f"- {key.replace('_', ' ')}: {_escape(str(value))}" for key, value in facts.items()),
        f"\n```python\nfrom transformers import {', '.join(classes)}\n",
        *(f"{loader}.from_pretrained({name!r})" for loader in classes),
        "```",
    ]
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    """Return a text on one line, with characters of Markdown and HTML escaped."""
    return html.escape(re.sub(r"([\\`*\[\]|])", r"\\\1", " ".join(text.split())), quote=False)


def _training_facts(manifest: Manifest, settings: TrainConfig) -> dict[str, str]:
    data, optimizer, schedule = settings.data, settings.optimizer, settings.schedule.schedule
    losses = {"training loss": manifest.loss, "held-out loss": manifest.evaluation_of_step}
    value, (name, _) = manifest.metric_of_step, manifest.decided_by
    batch = f"{manifest.global_batch_size:,} sequences of {data.seq_length:,} tokens"
    weights = manifest.data["phases"][-1]["weights"]
    shares = {name: weight / (sum(weights.values()) or 1) for name, weight in weights.items()}
    return {
        "length": f"{manifest.step:,} steps of {batch}, {manifest.tokens_seen:,} tokens in all",
        **{name: f"{loss:.4f} nats per token" for name, loss in losses.items() if loss is not None},
        **({} if value is None else {"chosen by": f"{name} {value:.4f}"}),
        "optimizer": f"{optimizer.optimizer}, learning rate {optimizer.peak_learning_rate:g}, {schedule}",
        "data, by weight": ", ".join(f"{name} {share:.2%}" for name, share in shares.items()),
    }

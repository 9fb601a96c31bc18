"""The README.md of an exported model: what it is, what it was trained on and how well, how to load it.

Plain Markdown behind the header that the Hugging Face hub reads. Nothing that only holds on the machine that trained
it, such as a path, is in it. The license is that of an imported model; of any other it is the user's to choose.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pretraining.checkpoint.manifest import Manifest, shape_of
from pretraining.config.training import TrainConfig
from pretraining.config.variants import parameter_count

MODEL_CARD = "README.md"


def model_card(
    name: str,
    manifest: Manifest,
    settings: TrainConfig,
    dtype: str,
    origin: Mapping[str, Any],
    *,
    has_tokenizer: bool,
) -> str:
    """Return the README.md of a checkpoint's weights.

    Args:
        name: of the model.
        settings: of the run, as the manifest keeps them.
        dtype: of the exported weights.
        origin: of the imported model that the run began with: license and base_model, where known.
        has_tokenizer: whether a tokenizer lies beside them.
    """
    classes = "AutoModelForCausalLM, AutoTokenizer" if has_tokenizer else "AutoModelForCausalLM"
    return "\n".join(
        [
            *("---", "library_name: transformers", "pipeline_tag: text-generation", "tags:", "- llama"),
            *(f"{key}: {json.dumps(origin[key])}" for key in ("license", "base_model") if origin.get(key)),
            *("---", ""),
            f"# {_plain(name)}",
            "",
            f"A Llama with {parameter_count(shape_of(manifest)):,} parameters in {dtype}.",
            "",
            *_section("Model", _model_rows(manifest)),
            *_section("Training", _training_rows(manifest, settings)),
            *_data_section(manifest),
            *("## Use", "", "```python", f"from transformers import {classes}", ""),
            f"model = AutoModelForCausalLM.from_pretrained({name!r}, dtype={dtype!r})",
            *([f"tokenizer = AutoTokenizer.from_pretrained({name!r})"] if has_tokenizer else []),
            *("```", ""),
        ]
    )


def _section(title: str, rows: Sequence[tuple[str, object]]) -> list[str]:
    return [f"## {title}", "", *_table(("", ""), rows), ""]


def _table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    for cells in (heads, ("---",) * len(heads), *rows):
        yield f"| {' | '.join(_plain(str(cell)) for cell in cells)} |"


def _plain(text: str) -> str:
    """Returns a text on one line that ends no cell of a table, and that is neither Markdown nor HTML."""
    return html.escape(re.sub(r"([\\`*\[\]|])", r"\\\1", " ".join(text.split())), quote=False)


def _model_rows(manifest: Manifest) -> list[tuple[str, object]]:
    return [(name, value) for name, value in vars(shape_of(manifest)).items() if value is not None]


def _training_rows(manifest: Manifest, settings: TrainConfig) -> list[tuple[str, object]]:
    if not manifest.data:
        return [("steps", "none: the weights are those that the run was to begin with")]
    adam = settings.optimizer
    rows: dict[str, Any] = {
        "steps": f"{manifest.step:,}",
        "tokens": f"{manifest.tokens_seen:,}",
        "training loss": _loss(manifest.loss),
        "held-out loss": _loss(manifest.evaluation_loss),
        "lowest held-out loss of the run": _loss(manifest.best_evaluation_loss),
        "sequence length": f"{settings.data.seq_length:,}",
        "sequences a step": f"{manifest.global_batch_size:,}",
        "optimizer": f"{adam.optimizer}, weight decay {adam.decay:g}",
        "learning rate": f"{adam.peak_learning_rate:g}, {settings.schedule.schedule} over {settings.run.num_steps}",
        "packing": settings.data.packing + (", attention inside documents" if settings.data.document_mask else ""),
        "seed": settings.run.seed,
    }
    return [(name, value) for name, value in rows.items() if value is not None]


def _loss(loss: float | None) -> str | None:
    return None if loss is None else f"{loss:.4f} nats a token"


def _data_section(manifest: Manifest) -> list[str]:
    data = manifest.data
    if not data:
        return []
    weights, counts = data["phases"][-1]["weights"], data["counts"]
    total = sum(weights.values()) or 1
    rows = []
    for name, samples in counts.items():
        held = data["datasets"].get(name, {}).get("tokens")
        share = f"{weights.get(name, 0) / total:.2%}"
        trained = f"{samples * manifest.tokens_seen // max(1, sum(counts.values())):,}"
        rows.append((name, share, trained, "made up" if held is None else f"{held:,}"))
    since = data["phases"][-1]["first_step"]
    note = [f"Weights are those since step {since:,}; before, others held.", ""] if since else []
    heads = ("dataset", "weight", "tokens trained on", "tokens in it")
    return ["## Data", "", *_table(heads, rows), "", *note]

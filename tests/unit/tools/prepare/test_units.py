"""The input cut into units."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from unit.tools.prepare.prepare_files import json_lines, packed, texts_of

from pretraining.tools.commands import PrepareConfig
from pretraining.tools.prepare import units
from pretraining.tools.prepare.units import find_input, read_part

TEXTS = [f"document {n} " * (n % 7) for n in range(40)]


def test_files_are_split_into_units_where_their_format_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "UNIT_BYTES", 500)
    for name, count in (("a.jsonl", 4), ("b.jsonl.gz", 1), ("c.txt", 1), ("d.parquet", 6)):
        path = tmp_path / name
        if name == "d.parquet":
            pq.write_table(pa.table({"text": TEXTS}), path, row_group_size=5)
        else:
            path.write_bytes("\n".join(TEXTS).encode() if name == "c.txt" else packed(name, json_lines(TEXTS)))
        found = find_input(PrepareConfig(input_path=(str(path),), text_field="text"))
        assert len(found.units) == count
        assert found.size == sum(unit.size for unit in found.units) == path.stat().st_size
        if name != "c.txt":
            parts = [part for unit in found.units for part in unit.parts]
            assert texts_of(document for part in parts for document in read_part(part, "text")) == TEXTS
        names = [part.name for unit in found.units for part in unit.parts]
        assert len(set(names)) == count and all(name in part_name for part_name in names)

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from pretraining.checkpoint import writer
from pretraining.checkpoint.chunks import Chunk
from pretraining.checkpoint.writer import file_of_tensor, plan_save

SHAPES = {
    "lm_head.weight": (7, 3),
    "model.embed_tokens.weight": (7, 3),
    **{
        f"model.layers.{block}.{name}.weight": shape
        for block in range(3)
        for name, shape in [("up", (12, 5)), ("norm", (5,))]
    },
}

chunks = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=3, max_size=3).map(
    lambda pairs: Chunk(tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs))
)


def marked(chunk: Chunk) -> np.ndarray:
    """Return a grid with ones inside the chunk."""
    grid = np.zeros((13, 13, 13), bool)
    grid[tuple(slice(begin, begin + size) for begin, size in zip(chunk.offsets, chunk.sizes, strict=True))] = True
    return grid


@given(chunks, chunks)
def test_an_overlap_is_the_part_in_both_chunks(left: Chunk, right: Chunk) -> None:
    both = marked(left) & marked(right)
    overlap = left.overlap(right)
    assert (marked(overlap) == both).all() if overlap else not both.any()


@contextmanager
def process(rank: int, world_size: int) -> Iterator[None]:
    """Pretend to be one process of many, without communication."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    yield
    dist.destroy_process_group()


def sharded(shape: tuple[int, ...], mesh_shape: tuple[int, int], rank: int) -> DTensor:
    """Return a tensor sharded as by FSDP, its rows divided along the second axis."""
    mesh = init_device_mesh("cpu", mesh_shape)
    pieces = torch.arange(float(np.prod(shape))).reshape(shape).chunk(mesh_shape[1])
    shard = rank % mesh_shape[1]
    local = pieces[shard] if shard < len(pieces) else torch.empty(0, *shape[1:])
    placements: tuple[Placement, ...] = (Replicate(), Shard(0))
    stride = torch.empty(shape).stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


@pytest.mark.parametrize("mesh_shape", [(1, 1), (4, 1), (1, 4), (2, 3), (3, 2), (1, 9)])
def test_every_element_is_written_by_one_process_and_replicas_share_the_work(mesh_shape: tuple[int, int]) -> None:
    world_size = mesh_shape[0] * mesh_shape[1]
    written = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    scalars, bytes_of_rank = [], []
    for rank in range(world_size):
        with process(rank, world_size):
            tensors: dict[str, torch.Tensor] = {
                name: sharded(shape, mesh_shape, rank) for name, shape in SHAPES.items()
            }
            plan = plan_save({**tensors, "optimizer.step": torch.tensor(3.0)})
        pieces = [piece for file in plan.files.values() for piece in file]
        for piece in pieces:
            if piece.name == "optimizer.step":
                scalars.append(rank)
                continue
            chunk = piece.chunk
            place = tuple(slice(begin, begin + size) for begin, size in zip(chunk.offsets, chunk.sizes, strict=True))
            written[piece.name][place] += 1
            whole = np.arange(np.prod(SHAPES[piece.name])).reshape(SHAPES[piece.name])
            assert (piece.values.numpy() == whole[place]).all()
        bytes_of_rank.append(sum(piece.values.nbytes for piece in pieces))
        assert plan.total_bytes == 4 * (sum(int(np.prod(shape)) for shape in SHAPES.values()) + 1)
    assert all((counts == 1).all() for counts in written.values()) and len(scalars) == 1
    largest = 4 * max(int(np.prod(shape)) for shape in SHAPES.values())
    for shard in range(mesh_shape[1]):  # the bytes of its replicas differ by less than a tensor
        replicas = bytes_of_rank[shard :: mesh_shape[1]]
        assert max(replicas) - min(replicas) <= largest


def test_files_hold_tensors_in_the_order_of_names_and_about_as_many_bytes_each(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {name: torch.empty(shape) for name, shape in SHAPES.items()}
    assert set(file_of_tensor(tensors, 1).values()) == {1}
    with monkeypatch.context() as patch:
        patch.setattr(writer, "FILE_BYTES", 260)
        files = file_of_tensor(tensors, 1)
        assert sorted(files, key=lambda name: (files[name], name)) == sorted(files) and set(files.values()) == {1, 2, 3}
        assert set(file_of_tensor(tensors, 4).values()) == {1}  # each process has a quarter of the bytes
    tensors = {f"model.layers.{block}.up.weight": torch.empty(10) for block in range(16)}
    monkeypatch.setattr(writer, "SMALL_FILE_BYTES", 80)  # a file per thread, unless they would be small
    assert max(file_of_tensor(tensors, 1).values()) == writer.FILES_OF_PROCESS
    assert max(file_of_tensor(tensors, 4).values()) == 2  # 160 bytes per process
    monkeypatch.setattr(writer, "FILE_BYTES", 80)
    assert max(file_of_tensor(tensors, 1).values()) == 8

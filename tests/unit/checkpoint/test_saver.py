from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from unit.checkpoint.examples import manifest_of

from pretraining.checkpoint import saver as saver_module
from pretraining.checkpoint.chunks import Chunk
from pretraining.checkpoint.saver import Saver, Staging
from pretraining.checkpoint.writer import SavePlan, WriteItem
from pretraining.config.training import CheckpointConfig


def share_of(*tensors: torch.Tensor) -> SavePlan:
    pieces = [
        WriteItem(str(number), Chunk((0,) * tensor.dim(), tuple(tensor.shape)), tensor)
        for number, tensor in enumerate(tensors)
    ]
    return SavePlan({"1": pieces[::2], "2": pieces[1::2]}, 0)


def test_a_copy_is_unchanged_until_the_next_copy_replaces_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver_module, "SLAB_BYTES", 256)
    tensors = [
        torch.randn(3, 5),
        torch.randn(1000),  # larger than a slab
        torch.tensor(3.0),
        torch.randn(4, 6).T,
        torch.arange(9, dtype=torch.uint8),
        torch.randn(2, 7).bfloat16(),
    ]
    before = [tensor.clone() for tensor in tensors]
    staging = Staging(torch.device("cpu"))
    copied = staging.copy(share_of(*tensors))
    for tensor in tensors:
        tensor.zero_()
    staging.hold_update()
    staging.wait()
    pieces = {int(piece.name): piece.values for file in copied.files.values() for piece in file}
    assert copied.files.keys() == {"1", "2"}
    for number, tensor in enumerate(before):
        assert torch.equal(pieces[number], tensor) and pieces[number].data_ptr() % pieces[number].element_size() == 0
    staging.copy(share_of(*tensors))
    assert not any(values.any() for values in pieces.values())


def test_the_copies_take_little_more_memory_than_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver_module, "SLAB_BYTES", 2**16)
    tensors = [torch.empty(size) for size in (1, 12_000, 10_000, 37, *[1000] * 40)]
    buffers = Staging(torch.device("cpu")).copy(share_of(*tensors)).files
    slabs = {
        piece.values.untyped_storage().data_ptr(): piece.values.untyped_storage().nbytes()
        for file in buffers.values()
        for piece in file
    }
    assert sum(slabs.values()) < 1.03 * sum(tensor.nbytes for tensor in tensors)


@pytest.mark.usefixtures("single_process")
def test_files_are_written_once_all_is_copied_and_no_update_comes_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(Staging, "wait", lambda staging: calls.append("copied"))
    monkeypatch.setattr(Staging, "hold_update", lambda staging: calls.append("update"))
    monkeypatch.setattr(saver_module, "save_checkpoint", lambda *args, **more: calls.append("written"))
    monkeypatch.setattr(Saver, "apply_retention", lambda *args: None)
    parameters = {"weight": torch.nn.Parameter(torch.ones(2, 2))}
    optimizer = torch.optim.SGD(parameters.values())
    saver = Saver(CheckpointConfig(ckpt_save_path=str(tmp_path), async_save=True), parameters, optimizer)
    assert saver.save(manifest_of(3), wait=False) is None
    saved = saver.wait()
    assert saved is not None and saved.step == 3 and calls[-2:] == ["copied", "written"]
    optimizer.step()
    assert calls[-1] == "update"
    saver.close()


class CopyStream:
    """Fake GPU staging, whose copies are done at once."""

    def wait_stream(self, other: object) -> None: ...
    def record_event(self) -> CopyStream:
        return self

    def synchronize(self) -> None: ...


def test_a_save_that_is_waited_for_uses_pinned_memory_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, staging = share_of(torch.randn(3)), Staging(torch.device("cpu"))
    staging.copy(plan)
    assert staging.copy_if_pinned(plan) is plan  # on a CPU, a copy would gain nothing
    staging = Staging(torch.device("cpu"))
    for name, stand_in in (("current_stream", lambda device: None), ("stream", lambda stream: nullcontext())):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(saver_module, "_allocate", lambda tensors, pinned: [torch.empty_like(each) for each in tensors])
    monkeypatch.setattr(staging, "_stream", CopyStream())
    assert staging.copy_if_pinned(plan) is plan  # the first save of a run allocates no memory for it
    background = staging.copy(plan)
    waited = staging.copy_if_pinned(plan)
    assert waited.files["1"][0].values is background.files["1"][0].values is not plan.files["1"][0].values
    assert torch.equal(waited.files["1"][0].values, plan.files["1"][0].values)

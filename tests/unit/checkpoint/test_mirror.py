"""Mirrors: their content, their writer, and starts from them; the store is a folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from training_runs import TINY, assert_same_tensors, checkpoints_of, losses_of, metrics_of

from pretraining.checkpoint import copies
from pretraining.checkpoint.branches import identity_of
from pretraining.checkpoint.copies import fetch_copy, read_copies
from pretraining.checkpoint.mirror import MIRROR_FILE, Mirror, TakenOverError, list_copies
from pretraining.checkpoint.run_folder import read_document
from pretraining.cli import main
from pretraining.config.training import CheckpointConfig
from pretraining.errors import CheckpointError, ConfigError, DamagedError, OutdatedError
from pretraining.files import with_checksum
from pretraining.object_store import Store, StoreError
from pretraining.tools.command_settings import PushConfig
from pretraining.tools.push import push

COMMON = [*TINY, "use_dummy_dataset=true", "batch_size=2", "num_steps=6", "checkpoint_interval=2"]
STEPS = {"step_2_ckp", "step_4_ckp", "step_6_ckp"}


def train(folder: Path, *flags: str) -> None:
    main(["train", *COMMON, f"ckpt_save_path={folder / 'run'}", f"ckpt_mirror_path=file://{folder}/store", *flags])


def copies_in(folder: Path) -> set[str]:
    return {path.parent.name for path in (folder / "store" / "checkpoints").glob("*/manifest.json")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with its mirror; tests must not change it."""
    folder = tmp_path_factory.mktemp("mirrored")
    for _ in range(3):  # each invocation waits for its last copy; an earlier copy may be skipped for a newer one
        train(folder, "run_steps=2")
    return folder


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_every_checkpoint_is_copied_with_settings_and_logs(trained: Path) -> None:
    assert copies_in(trained) == STEPS == checkpoints_of(trained / "run")
    for name in STEPS:
        assert_same_tensors(trained / "store" / "checkpoints" / name, trained / "run" / "checkpoints" / name)
    assert metrics_of(trained / "store") == metrics_of(trained / "run")
    assert (trained / "store" / "config.yaml").read_text() == (trained / "run" / "config.yaml").read_text()


def damage(checkpoint: Path) -> None:
    [shard] = checkpoint.glob("*.safetensors")
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_a_start_on_an_empty_disk_skips_damaged_copies_and_is_bit_for_bit_equal(copied: Path, trained: Path) -> None:
    shutil.rmtree(copied / "run")
    damage(copied / "store" / "checkpoints" / "step_4_ckp")
    [shard] = (copied / "store" / "checkpoints" / "step_6_ckp").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    train(copied)
    assert checkpoints_of(copied / "run") == STEPS
    for place in ("run", "store"):
        assert_same_tensors(*(each / place / "checkpoints" / "step_6_ckp" for each in (copied, trained)))
    assert losses_of(copied / "run") == losses_of(trained / "run")


def test_a_mirror_of_which_no_copy_is_complete_is_no_new_run(copied: Path) -> None:
    shutil.rmtree(copied / "run")
    two, four, six = (copied / "store" / "checkpoints" / name / "manifest.json" for name in sorted(STEPS))
    four.write_text("{")
    six.unlink()
    assert list_copies(config_of(copied)).complete.keys() == {"step_2_ckp"}
    two.write_text("{")
    with pytest.raises(SystemExit) as ending:
        train(copied)
    assert ending.value.code == 1 and not (copied / "run" / "checkpoints").exists()


def test_a_copy_takes_the_place_of_checkpoints_that_are_lost_or_damaged_on_disk(copied: Path) -> None:
    shutil.rmtree(copied / "run" / "checkpoints" / "step_4_ckp")
    for step in (2, 6):
        damage(copied / "run" / "checkpoints" / f"step_{step}_ckp")
    (copied / "run" / "logs" / "metrics.jsonl").write_text("")
    train(copied, "num_steps=8")
    assert copies_in(copied) == STEPS | {"step_8_ckp"}
    assert checkpoints_of(copied / "run") == {"step_2_ckp", "step_6_ckp", "step_8_ckp"}
    assert len(losses_of(copied / "run")) == 8


def test_names_in_a_downloaded_manifest_lead_nowhere_else(copied: Path) -> None:
    *_, newest = read_copies(f"file://{copied}/store").complete.values()
    entry = next(iter(newest.manifest.files.values()))
    hostile = replace(newest.manifest, files={"../outside.safetensors": entry})
    with pytest.raises(DamagedError, match="outside"):
        fetch_copy(replace(newest, manifest=hostile), copied / "run" / "checkpoints" / "fetched")
    assert not list(copied.rglob("outside*")) and not list(copied.rglob("fetched*"))


def config_of(folder: Path) -> CheckpointConfig:
    return CheckpointConfig(f"{folder}/run", ckpt_mirror_path=f"file://{folder}/store")


def test_the_mirror_of_another_run_is_refused(copied: Path) -> None:
    owner = copied / "store" / MIRROR_FILE
    list_copies(config_of(copied))
    owner.write_text(json.dumps(with_checksum({"run": "another", "writer": "a start"})))
    with pytest.raises(CheckpointError, match="another run") as caught:
        list_copies(config_of(copied))
    assert caught.value.settings == ("ckpt_mirror_path", "ckpt_save_path")
    owner.write_text("{")
    with pytest.raises(CheckpointError) as caught:
        list_copies(config_of(copied))
    assert str(caught.value.path).endswith(MIRROR_FILE)


def test_a_run_without_copies_begins_with_its_start_point(copied: Path) -> None:
    shutil.rmtree(copied / "store")
    mirror = Mirror(config_of(copied), "a run", copied / "run" / "checkpoints" / "step_6_ckp")
    mirror.start()
    assert mirror.finish(60.0) is None and copies_in(copied) == {"step_6_ckp"}


def test_a_manifest_that_the_store_gives_later_is_read_again(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, faults = Store.read, [StoreError("throttled")]

    def fail_once(self: Store, name: str) -> bytes | None:
        if faults and name.endswith("manifest.json"):
            raise faults.pop()
        return read(self, name)

    monkeypatch.setattr(Store, "read", fail_once)
    assert len(list_copies(config_of(copied), tries=2).complete) == 3 and not faults


def test_retention_removes_copies_except_the_best_and_those_of_the_user(tmp_path: Path) -> None:
    evaluated = ["held_out_fraction=0.1", "eval_interval=2", "eval_batches=1"]
    for rate in ("1e-2", "3", "3"):  # step 2 is the best
        train(tmp_path, "keep_last=1", "run_steps=2", *evaluated, f"learning_rate={rate}")
        mine = tmp_path / "store" / "checkpoints" / "keep_me"
        shutil.copytree(mine.with_name("step_2_ckp"), mine, dirs_exist_ok=True)
    assert checkpoints_of(tmp_path / "run") == {"step_2_ckp", "step_6_ckp"}
    assert copies_in(tmp_path) == {"step_2_ckp", "step_6_ckp", "keep_me"}


def test_a_return_sets_newer_copies_aside_and_costs_the_mirror_one_object_and_a_refused_one_nothing(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, write = list[str](), Store.write

    def watch(self: Store, name: str, pieces: Iterable[bytes]) -> None:
        written.append(name)
        write(self, name, pieces)

    monkeypatch.setattr(Store, "write", watch)
    with pytest.raises(SystemExit):
        train(copied, "resume_from_checkpoint=2", "hidden_size=16")
    assert copies_in(copied) == STEPS and {name.partition(".")[0] for name in written} == {"probe"}
    train(copied, "resume_from_checkpoint=2", "run_steps=1")
    assert [name for name in written if "step_2_ckp" in name] == ["checkpoints/step_2_ckp/manifest.json"]
    listed = read_copies(f"file://{copied}/store")
    assert listed.complete.keys() == {"step_2_ckp", "step_3_ckp"}
    assert {copy.name for copy in listed.set_aside.values()} == {"step_4_ckp", "step_6_ckp"}
    numbers = listed.complete["step_2_ckp"].manifest.branches
    assert numbers == read_document(copied / "run" / "checkpoints" / "step_2_ckp").branches and len(numbers) == 2


def test_a_newer_copy_of_another_machine_is_an_error_on_which_the_start_is_planned_again(copied: Path) -> None:
    newest = ids_of(copied)[-1]
    Mirror(config_of(copied), "a run", expected=newest, is_checked=True)
    for expected in (None, ids_of(copied)[0]):
        with pytest.raises(OutdatedError, match="step 6"):
            Mirror(config_of(copied), "a run", expected=expected, is_checked=True)


def ids_of(folder: Path) -> list[tuple[str, int]]:
    copies = read_copies(f"file://{folder}/store").complete.values()
    return sorted((identity_of(copy.manifest) for copy in copies), key=lambda identity: identity[1])


def mirror_of(folder: Path, *, spare_cores: bool = False) -> Mirror:
    return Mirror(config_of(folder), "a run", spare_cores=spare_cores)


def test_a_writer_that_another_one_follows_overwrites_nothing(copied: Path) -> None:
    old, new = mirror_of(copied), mirror_of(copied)
    path = copied / "run" / "checkpoints" / "step_6_ckp"
    other = copied / "run" / "checkpoints" / "step_4_ckp"
    shutil.rmtree(path)
    other.rename(path)  # other content under the same name
    before = {each: each.read_bytes() for each in (copied / "store").rglob("*") if each.is_file()}
    old.copy(path)
    with pytest.raises(TakenOverError):
        old.finish(60.0)
    assert before == {each: each.read_bytes() for each in (copied / "store").rglob("*") if each.is_file()}
    new.copy(path)
    assert new.finish(60.0) is None and not new.lacks(path)


def test_a_copy_is_never_half_replaced(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror, path = mirror_of(copied), copied / "run" / "checkpoints" / "step_6_ckp"
    uploaded: list[str] = []

    def upload(store: Store, file: Path, name: str, *_: object) -> None:
        uploaded.append(name)
        assert not (copied / "store" / "checkpoints" / "step_6_ckp" / "manifest.json").exists()
        raise CheckpointError("not now")

    monkeypatch.setattr("pretraining.checkpoint.mirror.upload_file", upload)
    shutil.rmtree(path)
    (copied / "run" / "checkpoints" / "step_4_ckp").rename(path)
    mirror.copy(path)
    assert mirror.finish(60.0) is not None and len(uploaded) == 1
    assert copies_in(copied) == {"step_2_ckp", "step_4_ckp"}


def test_an_upload_rests_until_the_run_is_over(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "REST_RATIO", 1e6)
    path = copied / "run" / "checkpoints" / "step_6_ckp"
    shutil.rmtree(copied / "store" / "checkpoints" / path.name)
    mirror = mirror_of(copied, spare_cores=True)
    mirror.copy(path)
    with pytest.raises(TimeoutError):
        mirror._work.result(1.0)  # type: ignore[union-attr]
    assert mirror.finish(60.0) is None and path.name in copies_in(copied)


def test_push_copies_what_is_missing_unless_the_mirror_is_newer(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(copied / "store" / "checkpoints" / "step_4_ckp")
    main(["push", str(copied / "run"), f"file://{copied}/store"])
    assert "1 checkpoint copied, 3 are in" in capsys.readouterr().out and copies_in(copied) == STEPS
    main(["push", str(copied / "run"), f"file://{copied}/other"])
    assert {path.name for path in (copied / "other" / "checkpoints").iterdir()} == STEPS
    shutil.rmtree(copied / "run" / "checkpoints" / "step_6_ckp")
    with pytest.raises(CheckpointError):
        push(PushConfig(paths=(str(copied / "run"), f"file://{copied}/store")))
    assert copies_in(copied) == STEPS


@pytest.mark.parametrize("words", [["{run}"], ["s3://b/x", "s3://b/y"], ["{run}", "elsewhere"]])
def test_push_needs_a_run_and_an_address(words: Sequence[str], trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "run", tmp_path / "run")
    text = (tmp_path / "run" / "config.yaml").read_text()
    (tmp_path / "run" / "config.yaml").write_text(text.replace(f"file://{trained}/store", "none"))
    with pytest.raises(ConfigError):
        push(PushConfig(paths=tuple(word.format(run=tmp_path / "run") for word in words)))


def test_commands_read_a_run_in_a_store(copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = []
    for place in (str(copied / "run"), f"file://{copied}/store"):
        main(["list", place, "--json"])
        listed = map(json.loads, capsys.readouterr().out.splitlines())
        rows.append([{**row, "age_seconds": 0, "bytes": 0} for row in listed])
    assert rows[0] == rows[1] and len(rows[0]) == 3
    main(["export", f"file://{copied}/store", f"--output_path={tmp_path / 'hf'}"])
    assert (tmp_path / "hf" / "model.safetensors").is_file()
    main(["inspect", f"--ckpt_load_path=file://{copied}/store/checkpoints/step_4_ckp", "--step=5", "--json"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["step"] == 5


def test_a_run_starts_from_a_checkpoint_in_a_store_fetched_once(copied: Path, tmp_path: Path) -> None:
    flags = [*COMMON, f"ckpt_load_path=file://{copied}/store", f"ckpt_save_path={tmp_path / 'next'}", "num_steps=8"]
    main(["train", *flags])
    assert len(losses_of(tmp_path / "next")) == 2
    shutil.rmtree(tmp_path / "next" / "checkpoints")
    shutil.rmtree(copied / "store")
    main(["train", *flags])
    assert len(losses_of(tmp_path / "next")) == 2

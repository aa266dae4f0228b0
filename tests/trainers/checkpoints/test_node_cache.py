"""What a node keeps of a store: what others prepared, data and models, all within a bound."""

from __future__ import annotations

import json
import os
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.object_store import give_up_soon
from trainers.config import Site, Workspace
from trainers.data import storage
from trainers.data.cache import cached_folder, in_use
from trainers.data.paths import UnusablePath, resolve
from trainers.data.storage import prepared_folder
from trainers.entrypoint import input_identity, train
from trainers.errors import BadDataError, BadSpecError, CacheError
from trainers.reporting import NeverStop, NullSink


def upload(folder: Path, target: storage.Place) -> storage.Place:
    for file in (path for path in folder.rglob("*") if path.is_file()):
        there = target
        for name in file.relative_to(folder).parts:
            there = there / name
        storage.put(there, file.read_bytes())
    return target


def node(name: Path, kept: storage.Place | str = "", **others) -> Workspace:
    return Workspace(checkpoints="", cache=str(name), prepared=str(kept), **others)


def writes(text: str):
    def build(folder: Path) -> None:
        (folder / "file").write_text(text)

    return build


def never(folder: Path) -> None:
    pytest.fail("it is built again")


def test_a_node_gets_logits_that_another_computed_from_the_store(bucket, config_in, recorder, tmp_path):
    first = train(config_in(tmp_path / "teacher", length={"steps": 1}), NullSink(), NeverStop())

    def distil(name: str, sink):
        config = config_in(
            tmp_path / name / "run",
            deterministic=True,
            model={"name": "tiny", "teacher": first.checkpoint},
            distillation={"soft_weight": 0.5},
            workspace__cache=str(tmp_path / name),
            workspace__prepared=str(bucket),
            workspace__model_roots=(str(tmp_path),),
        )
        ended = train(config, sink, NeverStop())
        (logits,) = (tmp_path / name / "teacher-logits").glob("*/logits.npy")
        return np.load(logits), (Path(ended.checkpoint) / "model.safetensors").read_bytes()

    other = type(recorder)()
    logits, model = distil("one", recorder)
    same_logits, same_model = distil("two", other)
    assert any("computing the teacher's logits" in line for line in recorder.logs)
    made_again = ("computing the teacher", "tokenised", "training a WordPiece")
    assert not [line for line in other.logs if any(words in line for words in made_again)]
    assert logits.tobytes() == same_logits.tobytes() and model == same_model


def test_what_is_kept_is_whole_or_not_there(root, tmp_path):
    def make(name: str, build) -> str:
        return (
            prepared_folder(node(tmp_path / name, root), "tokens", "key", build, print) / "file"
        ).read_text()

    def beside(folder: Path) -> None:
        assert make("two", writes("of two")) == "of two"  # At the same time, with other bits.
        writes("of one")(folder)

    assert make("one", beside) == "of one"
    assert make("three", never) in ("of one", "of two")
    for entry in (root / "tokens" / "key").iterdir():
        storage.put(entry / "file", b"half")
    assert make("four", writes("again")) == "again"
    assert make("five", never) == "again"
    for entry in (root / "tokens" / "key").iterdir():
        (entry / "manifest.json").unlink()
    assert make("six", writes("and again")) == "and again"


@pytest.mark.slow
def test_a_store_that_does_not_answer_is_not_taken_for_one_that_kept_nothing(
    bucket, served, tmp_path, monkeypatch
):
    give_up_soon(monkeypatch)
    served.failing += [500] * 1000
    with pytest.raises(CacheError, match=r"s3://.*/tokens/key: cannot be copied to this node"):
        prepared_folder(node(tmp_path, bucket), "tokens", "key", never, print)


def test_data_in_a_store_are_copied_once_and_are_the_same_data(bucket, served, config_in, shared, tmp_path):
    there = upload(shared / "data", bucket / "data") / "reviews"

    def on(root: storage.Place | Path, path: str, **others):
        roots = {"workspace__cache": str(tmp_path / "node"), "workspace__data_roots": (str(root),)}
        task = {"name": "imdb", "path": path, "max_length": 48}
        return config_in(tmp_path / "run", task=task, **roots, **others)

    near, far = on(shared / "data", "reviews"), on(bucket / "data", str(there))
    known = input_identity(near, near.workspace)
    assert input_identity(far, far.workspace) == known
    (copy,) = (tmp_path / "node" / "copies").glob("*/reviews")
    inode = copy.stat().st_ino
    relative = on(bucket / "data", "reviews", length={"steps": 1})
    assert train(relative, NullSink(), NeverStop()).status == "completed"
    assert copy.stat().st_ino == inode and len(list(copy.parents[1].glob("*/reviews"))) == 1
    storage.put(there / "train.jsonl", (there / "train.jsonl").read_bytes().replace(b"a", b"o", 1))
    assert input_identity(far, far.workspace)["train.sha256"] != known["train.sha256"]
    httpx.put(f"{served.target}/{there.key}/%2E%2E/%2E%2E/outside", content=b"not to be written")
    with pytest.raises(CacheError, match=r"'\.\./\.\./outside' cannot be the name of a file"):
        input_identity(far, far.workspace)


@pytest.mark.slow
def test_a_model_in_a_store_is_copied_without_what_only_its_training_needs(bucket, config_in, tmp_path):
    ended = train(config_in(tmp_path / "first", length={"steps": 1}), NullSink(), NeverStop())
    there = upload(Path(ended.checkpoint), bucket / "models" / "mine")
    (there / "manifest.json").unlink()
    config = config_in(
        tmp_path / "run",
        model={"name": str(there)},
        length={"steps": 1},
        workspace__cache=str(tmp_path / "node"),
        workspace__model_roots=(str(bucket / "models"),),
    )
    priced = {"storage_usd_per_gb_month": 0.02, "storage_source": "a price list"}
    stored = storage.place(f"{bucket}/runs")
    config = config.model_copy(
        update={
            "site": Site(**priced),
            "workspace": config.workspace.model_copy(update={"checkpoints": str(stored)}),
        }
    )
    ended = train(config, NullSink(), NeverStop())
    sizes = [
        status.st_size
        for name, status in stored.files().items()
        if "/step-" in name and "manifest" not in name
    ]
    assert ended.summary["stored_gb"] == sum(sizes) / 1e9 > 0
    assert ended.summary["storage_usd_per_month"] == 0.02 * ended.summary["stored_gb"]
    names = {path.name for path in (tmp_path / "node" / "copies").glob("*/mine/*")}
    assert "model.safetensors" in names and "optimizer.safetensors" not in names
    other = config.model_copy(update={"model": config.model.model_copy(update={"name": f"{there}2"})})
    with pytest.raises(BadSpecError, match=r"mine2' does not exist under s3://b\w+/prefix/models"):
        train(other, NullSink(), NeverStop())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("s3://bucket/data2/x", "outside the allowed folders"),
        ("s3://bucket/data/../other", "outside the allowed folders"),
        ("s3://bucket/data//x", "outside the allowed folders"),
        ("../other", "outside the allowed folders"),
        ("s3://key:very-secret@bucket/data/x", "credentials, region and endpoint come from the environment"),
        ("http://bucket/data/x", "http:// is not known"),
    ],
)
def test_what_is_not_below_a_declared_part_of_a_store_is_refused_unasked(text, problem):
    with pytest.raises(UnusablePath, match=problem) as refused:
        resolve(text, ["s3://bucket/data"], "dataset")
    assert "very-secret" not in str(refused.value)


def entry(cache: Path, key: str, size: int) -> Path:
    return cached_folder(cache / "copies", key, lambda folder: (folder / "x").write_bytes(b"x" * size), size)


def test_what_was_used_longest_ago_makes_room(tmp_path):
    bounded = node(tmp_path, cache_max_bytes=100)
    entry(tmp_path, "b", 40)  # Made before there was a bound
    for place, key in enumerate(("a", "b", "a", "c")):
        with in_use(bounded):
            entry(tmp_path, key, 40)
        os.utime(tmp_path / "copies" / f"{key}.used", (place, place))
    assert {path.name for path in (tmp_path / "copies").glob("?")} == {"a", "c"}
    with in_use(bounded):
        cached_folder(tmp_path / "tokens", "d", writes("x" * 60))  # Of a size that no one knew before
    assert not (tmp_path / "copies" / "a").exists() and (tmp_path / "tokens" / "d").exists()


def test_what_is_in_use_stays_and_the_error_says_how_much_that_is(tmp_path):
    bounded = node(tmp_path, cache_max_bytes=100)
    with in_use(bounded):
        held = entry(tmp_path, "a", 70)
        with in_use(bounded):
            entry(tmp_path, "b", 20)
        with in_use(bounded):
            with pytest.raises(
                CacheError, match="copy of 40 bytes: 70 of 100 bytes are in use; raise STILLHOUSE"
            ):
                entry(tmp_path, "c", 40)
            assert entry(tmp_path, "d", 30).is_dir()
        assert (held / "x").stat().st_size == 70
    with in_use(bounded):
        assert entry(tmp_path, "c", 40).is_dir()
    assert not held.exists()


def test_an_interrupted_removal_or_copy_is_made_again(tmp_path):
    bounded = node(tmp_path, cache_max_bytes=100)
    with in_use(bounded):
        folder = entry(tmp_path, "a", 60)
        (folder / "x").unlink()
        (tmp_path / "copies" / "a.used").unlink()
        assert (entry(tmp_path, "a", 60) / "x").is_file()  # As a run does with a checkpoint that it has read
    (folder / "x").unlink()
    (tmp_path / "copies" / "b.used").write_text("60")  # Of a process that was killed while it copied
    with in_use(bounded):
        assert (entry(tmp_path, "a", 60) / "x").is_file()
    assert json.loads((folder / "sizes.json").read_text()) == {"x": 60}


def test_an_empty_dataset_in_a_store_is_one_line(bucket, config_in, tmp_path):
    storage.put(bucket / "data" / "empty" / "train.jsonl", b"")
    task = {"name": "imdb", "path": str(bucket / "data" / "empty")}
    roots = {"workspace__cache": str(tmp_path), "workspace__data_roots": (str(bucket / "data"),)}
    config = config_in(tmp_path / "run", task=task, **roots)
    with pytest.raises(BadDataError, match=r"empty/train\.jsonl: the dataset is empty"):
        input_identity(config, config.workspace)

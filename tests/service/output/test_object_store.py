"""An installation whose runs keep their files in an object store."""

from __future__ import annotations

import io
import json
import logging
import re
import socket
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from service.config.document import SpecError
from service.config.hardware import CATALOGUE
from service.config.settings import Settings
from service.db.backup import BackupError, back_up, restore
from service.domain.records import Run
from service.driving.choosing import SourceModels
from service.driving.sweep_context import SweepContext
from service.local.doctor import FindingHealth, examine
from service.output.model_folder import open_model
from service.output.run_data import _tokenizer, predicted_units, run_data
from service.output.run_files import (
    NoTrace,
    json_lines,
    known_scores,
    predictions_file,
    read_histograms,
    read_patch,
    saved_checkpoints,
)
from service.scheduling import driver_settings
from service.scheduling.admission import checked_plans
from service.specs.data import train_examples
from service.specs.experiment import read_stored, validate
from service.specs.models import NoModel, checkpoint_of, stored_experiment
from service.store import Store
from tests.api.trained_model import trained
from tests.object_store import KEY, SECRET, ObjectStore, give_up_soon, in_environment, object_store
from trainers.config import TaskConfig
from trainers.data import storage
from trainers.data.storage import ObjectPath
from trainers.data.synthetic import write_corpus
from trainers.models.origin import WEIGHTS, Preset


@pytest.fixture(scope="module")
def served() -> Iterator[ObjectStore]:
    with object_store() as store, in_environment(store):
        yield store


HALVES = {
    "of a stated length": b"Content-Length: 10\r\n\r\nhalf",
    "in a chunk": b"Transfer-Encoding: chunked\r\n\r\na\r\nhalf",
    "between chunks": b"Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
}


@pytest.mark.parametrize("rest", HALVES.values(), ids=HALVES)
def test_half_a_body_is_no_object(
    served: ObjectStore, rest: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    served.make_bucket("halves")
    with socket.create_connection(("127.0.0.1", served.port)) as sender:
        sender.sendall(b"PUT /halves/half HTTP/1.1\r\nHost: store\r\n" + rest)
        sender.shutdown(socket.SHUT_WR)
        assert sender.recv(100) == b""
    assert httpx.get(f"{served.target}/halves/half").status_code == 404
    assert capfd.readouterr().err == ""


@pytest.fixture
def settings(served: ObjectStore, tmp_path: Path) -> Settings:
    url = served.make_bucket(f"b{abs(hash(tmp_path)):x}")
    write_corpus(tmp_path / "texts", train=48, test=32, seed=0)
    return Settings(
        data_dir=tmp_path / "data",
        cache_dir=tmp_path / "scratch",
        storage_url=f"{url}/team",
        data_roots=str(tmp_path),
    )


@pytest.fixture
def store(settings: Settings) -> Iterator[Store]:
    opened = Store.open(settings, migrate=True)
    yield opened
    opened.close()


def train_one(store: Store, settings: Settings) -> Run:
    document = {
        "name": "stored",
        "task": {"name": "imdb", "path": "texts", "max_length": 32},
        "model": {"name": "tiny"},
        "length": {"steps": 4},
        "batch": {"global_size": 8},
    }
    return trained(store, settings, document)


def test_what_a_run_left_is_read_from_the_store_and_removed_with_it(
    store: Store, settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    run = train_one(store, settings)
    best = checkpoint_of(settings, run, "best")
    assert isinstance(best, ObjectPath) and str(best).startswith(f"{settings.storage_url}/experiments/")
    (saved,) = saved_checkpoints(store, settings, run.id)
    assert (saved.path, saved.best, saved.problem) == (str(best), True, None)
    assert saved.size_bytes and saved.saved_s
    model = open_model(store, settings, run.id, "best")
    size, archive = model.size, b"".join(model.tar())
    assert len(archive) == size
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        assert {"model.safetensors", "tokenizer.json"} <= set(tar.getnames())
    (tmp_path / "linked").mkdir()
    open_model(store, settings, run.id, "best").link(tmp_path / "linked")
    assert (tmp_path / "linked" / "model.safetensors").read_bytes() == (
        best / "model.safetensors"
    ).read_bytes()
    units = [json.loads(line)["unit"] for line in json_lines(predictions_file(store, settings, run.id))]
    assert set(known_scores(store, settings, run) or {}) == set(units)
    tokenizer = _tokenizer(store, settings, run.id)
    assert tokenizer is not None and (tokenizer / "tokenizer.json").is_file()
    read_patch(store, settings, run.id)
    for text in (
        driver_settings.document(settings).decode(),
        caplog.text,
        store.runs.config(run.id),
        str(store.runs.summary(run.id)),
    ):
        assert KEY not in text and SECRET not in text
    assert not list((settings.data_dir / "experiments").rglob("*.safetensors"))
    store.removal.delete(run.experiment_id, at_once=True)
    for _ in store.removal.removing(run.experiment_id):
        pass
    assert not stored_experiment(settings, run.experiment_id).is_dir()


def problems(settings: Settings, **sections: Any) -> list[tuple[str, str]]:
    spec = validate({"name": "x", "length": {"steps": 1}, **sections})
    try:
        checked_plans(spec, settings.roots, CATALOGUE, None)
    except SpecError as error:
        return [(problem.type, problem.message) for problem in error.problems]
    return []


@pytest.fixture
def stored(settings: Settings, tmp_path: Path) -> Settings:
    """Data and models are in the store; `texts` and `whole` are there."""
    url = str(settings.storage_url).removesuffix("/team")
    for file in (tmp_path / "texts").iterdir():
        storage.put(storage.place(f"{url}/data/texts/{file.name}"), file.read_bytes())
    config = {**Preset("tiny").config(30522), "architectures": []}
    for name, content in {"config.json": json.dumps(config), "tokenizer.json": "{}", WEIGHTS: "-"}.items():
        storage.put(storage.place(f"{url}/models/whole/{name}"), content.encode())
    roots = {"data_roots": f"{tmp_path / 'data'}:{url}/data", "model_roots": f"{url}/models"}
    return Settings(**{**settings.model_dump(), **roots})


def test_data_and_models_in_a_store_are_checked_at_submission(stored: Settings) -> None:
    (_, there, *_), (models,) = stored.roots("data"), stored.roots("model")
    driver = driver_settings.read(driver_settings.document(stored))
    assert (driver.roots("data")[1], driver.roots("model")) == (there, (models,))

    def problem(path: str, model: str = "tiny", **model_fields: Any) -> str | None:
        task = {"name": "imdb", "path": path, "max_length": 32}
        document = {
            "name": "x",
            "length": {"steps": 1},
            "task": task,
            "model": {"name": model, **model_fields},
        }
        try:
            checked_plans(validate(document), stored.roots, CATALOGUE, None)
        except SpecError as error:
            (found,) = error.problems
            return f"{found.type}: {found.message}"
        return None

    assert problem(f"{there}/texts", f"{models}/whole") is None
    assert problem("texts", "whole") is None
    assert "layer 7 does not exist" in str(problem("texts", "whole", layers=[0, 7]))
    (models / "whole" / WEIGHTS).unlink()
    assert problem("texts", "whole") == (
        f"model-without-weights: 'whole' has no weights: {WEIGHTS} is missing; add it"
    )
    storage.put(there / "texts" / "train.jsonl", b'{"text": "without a label"}\n')
    assert str(problem("texts")).startswith(
        f"bad-data: {there}/texts/train.jsonl, line 1, field label: missing"
    )
    assert "path-outside-roots: 's3://other/texts' is outside the allowed" in str(problem("s3://other/texts"))
    assert f"path-not-found: '{there}/texts2' does not exist under" in str(problem(f"{there}/texts2"))
    refused = str(problem(f"s3://{KEY}:{SECRET}@b/x"))
    assert "credentials, region and endpoint come from the environment" in refused and SECRET not in refused
    with pytest.raises(ValidationError, match="give URLs without credentials") as wrong:
        Settings(data_roots=f"s3://{KEY}:{SECRET}@b/x")
    assert SECRET not in str(wrong.value)


@pytest.mark.slow
def test_a_run_on_data_in_a_store_is_shown_with_its_texts(store: Store, stored: Settings) -> None:
    run = train_one(store, stored)
    shown = run_data(store, stored, run.id)
    assert shown.problem is None and shown.parts["train"].rows == 48 and shown.parts["train"].samples
    page = predicted_units(store, stored, run.id, "worst", None, None, None, 0, 9)
    assert all(unit.texts for unit in page.items)
    assert train_examples(TaskConfig(name="imdb", path="texts"), stored.roots("data"))


@pytest.mark.slow
def test_a_store_that_does_not_answer_is_no_missing_model(
    store: Store,
    settings: Settings,
    served: ObjectStore,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = train_one(store, settings)
    give_up_soon(monkeypatch)
    served.failing += [500] * 1000
    try:
        spec = read_stored(store.runs.config(run.id))
        sources = SourceModels(SweepContext(store, settings, 2, 1, spec, {}))
        assert sources.of(replace(run, teacher=f"run:{run.id}"), seed=0) is None, (
            "runs that start from it wait"
        )
        assert re.search(rf"trying again: run {run.id}: s3://.* cannot be read", caplog.text)
        with pytest.raises(NoModel, match=rf"run {run.id}: s3://.* cannot be read"):
            saved_checkpoints(store, settings, run.id)
        with pytest.raises(NoTrace, match=rf"run {run.id}: s3://.* cannot be read"):
            read_histograms(store, settings, run.id)
    finally:
        served.failing.clear()


@pytest.mark.slow
def test_a_restore_sets_aside_in_the_store_what_the_database_does_not_have(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    archive = tmp_path / "backup.tar"
    with pytest.raises(BackupError, match="checkpoints are in s3://"):
        back_up(settings, archive, checkpoints=True)
    back_up(settings, archive, checkpoints=False)
    later = train_one(store, settings)
    store.close()
    restore(settings, archive, replace=True)
    assert not stored_experiment(settings, later.experiment_id).is_dir()
    (aside,) = (
        entry for entry in settings.resolved_storage().iterdir() if entry.name.startswith("set-aside-")
    )
    assert (aside / "experiments" / str(later.experiment_id)).is_dir()


def test_the_doctor_tries_the_store(settings: Settings) -> None:
    def found(settings: Settings) -> FindingHealth:
        return next(one.health for one in examine(settings) if one.subject == "storage")

    assert found(settings) is FindingHealth.ok
    assert found(settings.model_copy(update={"storage_url": "s3://no-such-bucket/x"})) is FindingHealth.broken

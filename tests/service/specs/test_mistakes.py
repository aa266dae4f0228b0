"""88 mistakes that people make in specs and data: each is refused at its place, in one line with its fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from service.config.document import SpecError
from service.config.hardware import CATALOGUE
from service.scheduling.admission import checked_plans, read_spec


def spec(extra: str = "", **changed: str | None) -> str:
    """A valid spec with other fields instead; None leaves one out."""
    fields = {
        "name": "first", "task": "{name: classification, path: good}", "model": "{name: tiny}",
        "length": "{epochs: 1}", **changed,
    }  # fmt: skip
    return "".join(f"{name}: {value}\n" for name, value in fields.items() if value is not None) + extra + "\n"


def task(more: str = "", path: str = "good") -> str:
    return spec(task=f"{{name: classification, path: {path}, {more}}}")


def axes(written: str, more: str = "") -> str:
    return spec(f"search: {{axes: {{{written}}}{more}}}")


PRECISIONS = "input should be 'fp32', 'tf32', 'fp16', 'bf16' or 'auto'"


class Mistake(NamedTuple):
    what: str
    text: str
    place: str  # Field, or what the line begins with
    fix: str  # What the line says to do, or which values there are


MISTAKES = [Mistake(*entry) for entry in (
    # Documents.
    ("indented by a tab", "name: first\ntask:\n\tname: imdb\n", "line 3", "indent with spaces"),
    ("two documents", spec("---\nname: second"), "line 5", "make it a file of its own"),
    ("a key twice", spec("name: second"), "line 5", "keep one"),
    ("an alias", "x: &d {epochs: 1}\n" + spec(length="*d"), "line 5", "write the value out instead"),
    ("an empty file", "", "the document is empty", "write fields, such as name: first"),
    ("a comma too many in JSON", '{"name": "first", "task": {"name": "imdb",}},}', "line 1",
     "put a comma between two entries"),
    ("a colon in a text", spec("description: note: this"), "line 5", "quote a text with a colon"),
    ("no space after a colon", spec("seeds:[0, 1]"), "line 6", "write key: value, with a space"),
    # Names.
    ("no name", spec(name=None), "name", "add it"),
    ("no task", spec(task=None), "task", "add it"),
    ("no name of a task", spec(task="{path: good}"), "task.name", "add it"),
    ("a section misspelt", spec("optimzer: {name: adamw}"), "optimzer", "did you mean 'optimizer'?"),
    ("a field misspelt", spec("batch: {global_sice: 8}"), "batch.global_sice", "did you mean 'global_size'?"),
    ("lr", spec("lr: 1.0e-4"), "lr", "did you mean 'optimizer.learning_rate'?"),
    ("epochs outside length", spec("epochs: 3", length=None), "epochs", "did you mean 'length.epochs'?"),
    ("epochs of Hugging Face", spec("num_train_epochs: 3"), "num_train_epochs",
     "did you mean 'length.epochs'?"),
    ("batch_size", spec("batch_size: 32"), "batch_size", "did you mean 'batch.global_size'?"),
    ("batch of Hugging Face", spec("per_device_train_batch_size: 8"), "per_device_train_batch_size",
     "did you mean 'batch.micro_size'?"),
    ("fp16 as a flag", spec("fp16: true"), "fp16", "did you mean 'precision'?"),
    ("gpus", spec("gpus: 2"), "gpus", "did you mean 'parallel.workers'?"),
    ("an earlier name", spec(model="{student: tiny}"), "model.student", "it is now model.name"),
    ("the size of a model", spec(model="{name: tiny, hidden_size: 256}"), "model.hidden_size",
     "did you mean 'name'?"),
    ("dropout outside model", spec("dropout: 0.1"), "dropout", "did you mean 'model.dropout'?"),
    ("gpus as a resource", spec("resources: {gpus: 1}"), "resources.gpus",
     "did you mean 'hardware' or 'parallel.workers'?"),
    ("an environment", spec("environment: {CUDA_VISIBLE_DEVICES: 0}"), "environment",
     "known: batch, budget,"),
    ("a program", spec("entrypoint: python train.py"), "entrypoint", "did you mean 'task.name'?"),
    ("a metric outside search", spec("metric: accuracy"), "metric", "did you mean 'search.metric'?"),
    ("early stopping", spec("early_stopping: true"), "early_stopping",
     "did you mean 'search.stop_diverging'?"),
    ("a deadline", spec("deadline: 8h"), "deadline", "did you mean 'budget.hours'?"),
    ("a field of another optimizer", spec("optimizer: {no_prox: true}"), "optimizer",
     "remove optimizer.no_prox or set optimizer.name: adan"),
    # Values.
    ("an unknown task", spec(task="{name: sentiment, path: good}"), "task.name",
     "input should be 'classification', 'regression',"),
    ("an optimizer of Hugging Face", spec("optimizer: {name: adamw_torch}"), "optimizer.name",
     "input should be 'adamw' or 'adan'"),
    ("hardware misspelt", spec("hardware: A1000"), "hardware", "did you mean 'A100'?"),
    ("hardware by its interface", spec("hardware: cuda"), "hardware", "known: A10, A100,"),
    ("an unknown precision", spec("precision: fp8"), "precision", PRECISIONS),
    ("a precision by torch's name", spec("precision: float16"), "precision", PRECISIONS),
    ("fp16 on a processor", spec("precision: fp16"), "precision", "it supports fp32, bf16"),
    ("a learning rate as text", spec("optimizer: {learning_rate: 1e-4x}"), "optimizer.learning_rate",
     "input should be a valid number"),
    ("a negative learning rate", spec("optimizer: {learning_rate: -0.1}"), "optimizer.learning_rate",
     "input should be greater than 0"),
    ("a huge learning rate", spec("optimizer: {learning_rate: 30}"), "optimizer.learning_rate",
     "input should be less than or equal to 10"),
    ("a learning rate that is none", spec("optimizer: {learning_rate: .nan}"), "optimizer.learning_rate",
     "input should be a finite number"),
    ("one beta", spec("optimizer: {betas: [0.9]}"), "optimizer",
     "change optimizer.betas or optimizer.name"),
    ("a schedule of Hugging Face", spec("optimizer: {schedule: linear_with_warmup}"), "optimizer.schedule",
     "input should be 'linear', 'constant',"),
    ("an empty batch", spec("batch: {global_size: 0}"), "batch.global_size",
     "input should be greater than or equal to 1"),
    ("a batch as text", spec("batch: {global_size: '16'}"), "batch.global_size",
     "input should be a valid integer"),
    ("two lengths", spec(length="{epochs: 1, steps: 10}"), "length", "give exactly one of epochs and steps"),
    ("a seed instead of seeds", spec("seeds: 3"), "seeds", "input should be a list, such as [3]"),
    ("a seed twice", spec("seeds: [1, 1]"), "seeds", "list each once, and set repeats to run it again"),
    ("an unknown priority", spec("queue: {priority: highest}"), "queue.priority",
     "use low, normal, high, urgent, or a number from 0 to 100"),
    ("a budget with its unit", spec("budget: {cost_usd: 5 USD}"), "budget.cost_usd",
     "input should be a valid number"),
    ("a name with a slash", spec(name="bert/first"), "name", "such as bert-first"),
    ("a length beyond the model's", task("max_length: 100000"), "task.max_length",
     "input should be less than or equal to 512"),
    ("a fraction in percent", task("validation_fraction: 20"), "task.validation_fraction",
     "input should be less than 1"),
    # Combinations.
    ("several workers without a strategy", spec("parallel: {strategy: single, workers: 2}"), "parallel",
     "set parallel.strategy: ddp or parallel.workers: 1"),
    ("a batch that cannot be divided",
     spec("parallel: {strategy: ddp, workers: 3}\nbatch: {global_size: 16}"), "batch.global_size",
     "use a multiple of 3, such as 18"),
    ("more stages than layers",
     spec("parallel: {strategy: pipeline, workers: 4}\nbatch: {global_size: 16}"), "4 stages need",
     "lower parallel.stages, or parallel.workers if that is unset"),
    ("a temperature without a teacher", spec("distillation: {temperature: 4.0}"), "distillation",
     "set model.teacher or remove distillation"),
    ("a teacher that is not there", spec(model="{name: tiny, teacher: bert-teacher}"), "model.teacher",
     "give a folder, hub:<id>, run:<id>"),
    ("a shared device measured alone", spec("queue: {share_device: true}\nmeasure: exclusive"), "measure:",
     "set queue.share_device: false, or measure: shared"),
    ("a field of another task", task("stride: 64"), "task", "remove task.stride or set task.name: squad_v2"),
    ("a micro-batch beyond the batch", spec("batch: {global_size: 8, micro_size: 16}"), "batch.micro_size",
     "choose a divisor of 8"),
    # Axes.
    ("an axis of one value", axes("precision: fp32"), "search.axes", 'list its values, such as ["fp32"]'),
    ("an axis by another name", axes("lr: [0.1]"), "search.axes.lr",
     "did you mean 'optimizer.learning_rate'?"),
    ("an axis without values", axes("precision: []"), "search.axes", "give at least one value or remove it"),
    ("an axis with a value twice", axes("precision: [fp32, fp32]"), "search.axes",
     "repeat runs with seeds instead"),
    ("seeds as an axis", axes("seeds: [0, 1]"), "search.axes.seeds", "set it outside search.axes"),
    ("an axis as a section", axes("batch: {global_size: [8, 16]}"), "search.axes",
     "name its fields with dots, such as batch.global_size: [8, 16]"),
    ("a bad value of an axis", axes("precision: [fp32, fp64]"), "precision", PRECISIONS),
    ("a grid that is too large", axes("precision: [fp32, bf16]") + f"seeds: {list(range(6000))}",
     "the grid has", "shorten search.axes or seeds, or sample with search.name: random"),
    ("random without samples", axes("precision: [fp32, bf16]", ", name: random"), "search",
     "set the number of combinations"),
    ("a search of W&B", axes("precision: [fp32, bf16]", ", name: bayes"), "search.name",
     "input should be 'grid', 'random', 'asha' or 'tpe'"),
    ("a range in a grid", axes("optimizer.learning_rate: {low: 1.0e-5, high: 1.0e-3}"), "search",
     "list values, or use search.name: random with samples"),
    # Data and models.
    ("data that are not there", task(path="missing"), "task.path", "put it there, or give another folder"),
    ("data outside the roots", task(path="/etc"), "task.path",
     "move it into one, or add its folder to the service's STILLHOUSE_DATA_ROOTS"),
    ("a folder without data", task(path="notes"), "task.path",
     "expected train.jsonl, train.csv, train.tsv or train.parquet"),
    ("one class", task(path="one_class"), "task.path", "add examples of other labels"),
    ("an empty part", task(path="empty"), "task.path", "the train part has no rows; add rows"),
    ("a line that is not JSON", task(path="broken"), "task.path", "write one object per line"),
    ("Latin-1", task(path="latin"), "task.path", "convert the file to UTF-8"),
    ("a row with a field too few", task(path="ragged"), "task.path",
     "complete the row, or set task.skip: [malformed]"),
    ("a row without its label", task(path="unlabelled"), "task.path",
     "set task.columns.label to one of these"),
    ("a label of the test part alone", task(path="new_label"), "task.path",
     "add training examples of it, or remove its rows"),
    ("columns by other names", task(path="renamed"), "task.path", "set task.columns.text to one of these"),
    ("a shard that is missing", task(path="shards"), "task.path", "copy all shards of one series there"),
    ("a column that is not there", task("columns: {text: sentence}"), "task.path", "name one of these"),
    ("a column for no field", task("columns: {input: text}"), "task", "use text, text_pair, label"),
    ("a model of the hub as a folder", spec(model="{name: bert-base-uncased}"), "model.name",
     "give a folder, hub:<id>, run:<id>, or a preset"),
    ("a model without weights", spec(model="{name: model}"), "model.name",
     "model.safetensors is missing; add it"),
)]  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good data, bad data, and a model of which the weights are missing."""
    root = tmp_path_factory.mktemp("data")

    def write(name: str, text: str, encoding: str = "utf-8") -> None:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text, encoding=encoding)

    def rows(*labels: str | None, text: str = "text") -> str:
        return "".join(
            json.dumps({text: f"number {n}", **({} if label is None else {"label": label})}) + "\n"
            for n, label in enumerate(labels)
        )

    good = rows(*"ab" * 10)
    write("good/train.jsonl", good)
    write("one_class/train.jsonl", rows(*"a" * 9))
    write("empty/train.jsonl", "")
    write("broken/train.jsonl", good + "{not json\n")
    write("latin/train.csv", "text,label\ncaf\xe9,a\ntea,b\n", "latin-1")
    write("ragged/train.csv", "text,label\none,a\ntwo\nthree,b\n")
    write("unlabelled/train.jsonl", rows("a", "b", "a", "b", None, "a"))
    write("new_label/train.jsonl", good)
    write("new_label/test.jsonl", rows("c"))
    write("renamed/train.jsonl", rows(*"ab" * 10, text="sentence"))
    write("shards/train-00000-of-00003.jsonl", good)
    write("notes/readme.md", "nothing")
    write("model/config.json", "{}")
    return root


def said(text: str, root: Path) -> list[str]:
    """The lines that refuse a spec; none where it is accepted."""
    try:
        checked_plans(read_spec(text.encode(), CATALOGUE), lambda kind: (root,), CATALOGUE, find_run=None)
    except SpecError as error:
        return error.lines()
    return []


def test_the_spec_without_a_mistake_is_accepted(root: Path) -> None:
    assert said(spec(), root) == []


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.what)
def test_a_mistake_is_one_line_with_its_place_and_its_fix(mistake: Mistake, root: Path) -> None:
    lines = said(mistake.text, root)
    assert len(lines) == 1, lines or "silent"
    assert lines[0].startswith(mistake.place)
    assert "\n" not in lines[0]
    assert mistake.fix in lines[0]


def test_there_are_88_of_them() -> None:
    assert len({mistake.what for mistake in MISTAKES}) == len(MISTAKES) == 88

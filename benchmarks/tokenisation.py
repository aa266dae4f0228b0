"""Tokenising and packing text, from JSON lines to sequences, next to `map` of Hugging Face `datasets`.

    python -m benchmarks.tokenisation [--texts FILE] [--tokenizer FOLDER] [--mib N] [--rounds R]

Both read the same JSON lines, tokenise them with the same WordPiece vocabulary and pack them into
sequences of 128 tokens on disk:

- ours: `Mlm.prepare` into an empty cache, as the first run on a dataset does;
- theirs: `load_dataset("json")`, a fast tokenizer in `map(batched=True)` and the grouping of
  `run_mlm.py` in a second `map`, with one process (whose tokenizer uses all cores) and with one
  process per core; the faster of the two counts.

Each contender runs in a process of its own, so that its peak of resident memory, its children's
included, is its own; they take turns, and each entry is the median of the rounds. `tokenise_vs_map` is
their time by ours, `tokens_per_s` ours, `peak_rss_mib` and `seconds` those of each, and `second_start_s`
`Mlm.prepare` when the cache is there. Without `--texts` synthetic text of the same size stands in,
whose words are as unevenly frequent as those of English (Zipf's law); without `--tokenizer` a
vocabulary is trained on it, outside the timed region. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.options import Benchmark

BENCHMARK = Benchmark(
    "tokenisation",
    __doc__,
    fields=("tokenise_vs_map", "tokens_per_s", "peak_rss_mib", "seconds", "second_start_s"),
)
LENGTH = 128
SIZE_MIB = 66
ROUNDS = 3
_ALL = 10**9
_DISTINCT_WORDS = 400_000


def measure(
    texts: Path | None = None,
    tokenizer: Path | None = None,
    *,
    size_mib: int = SIZE_MIB,
    rounds: int = ROUNDS,
) -> dict[str, Any]:
    """Both paths on the same text.

    Args:
        texts: JSON lines with a field `text`, perhaps compressed; None = synthetic text.
        tokenizer: folder with a `tokenizer.json`; None = trained on the text.
        size_mib: of the synthetic text.
        rounds: of all contenders in turn.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = folder / "corpus" / "train.jsonl"
        _write_corpus(corpus, texts, size_mib)
        model = folder / "model"
        _write_model(model, corpus, tokenizer)
        seen: dict[str, list[dict[str, float]]] = {"ours": [], "map_1": [], f"map_{_cores()}": []}
        for _ in range(rounds):
            for contender, results in seen.items():
                results.append(_in_own_process(contender, corpus, model))
        medians = {
            contender: {key: statistics.median(one[key] for one in results) for key in results[0]}
            for contender, results in seen.items()
        }
    ours = medians["ours"]
    theirs = min((medians[name] for name in seen if name != "ours"), key=lambda one: one["seconds"])
    return {
        "tokenise_vs_map": round(theirs["seconds"] / ours["seconds"], 2),
        "second_start_s": round(ours["second_s"], 3),
        "tokens_per_s": round(ours["tokens"] / ours["seconds"]),
        "peak_rss_mib": {name: round(one["peak_rss_mib"]) for name, one in medians.items()},
        "seconds": {name: round(one["seconds"], 2) for name, one in medians.items()},
        "all_seconds": {
            name: [round(one["seconds"], 2) for one in results] for name, results in seen.items()
        },
        "sequences": {name: int(one["sequences"]) for name, one in medians.items()},
        "text": "real" if texts else "synthetic",
        "cpus": _cores(),
    }


def _ours(corpus: Path, model: Path, cache: Path) -> dict[str, float]:
    from trainers.config import RunConfig
    from trainers.models.origin import Folder
    from trainers.tasks import TASKS, base

    # All of the text; there is a validation part, of one line, so that none of it is held out.
    sizes = {"train": _ALL, "validation": 1}
    TASKS["mlm"] = dataclasses.replace(TASKS["mlm"], default_examples=sizes)
    mlm = base.build("mlm")
    config = RunConfig.model_validate(
        {
            "task": {"name": "mlm", "path": corpus.parent.name, "max_length": LENGTH, "test": "none"},
            "seed": 0,
            "rates": {
                "hardware": "cpu",
                "device": "cpu",
                "price_usd_per_hour": 0,
                "price_date": "",
                "tdp_w": 1,
            },
            "workspace": {
                "checkpoints": "unused",
                "cache": str(cache),
                "data_roots": [str(corpus.parent.parent)],
            },
        }
    )
    began = time.perf_counter()
    prepared = mlm.prepare(config, Folder(model), lambda line: None)
    seconds = time.perf_counter() - began
    mlm.prepare(config, Folder(model), lambda line: None)
    return {
        "seconds": seconds,
        "second_s": time.perf_counter() - began - seconds,
        "tokens": float(prepared.train.offsets[-1]),
        "sequences": float(len(prepared.train)),
    }


def _map(corpus: Path, model: Path, cache: Path, processes: int) -> dict[str, float]:
    import datasets
    from transformers import PreTrainedTokenizerFast

    datasets.disable_progress_bars()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(model / "tokenizer.json"))
    count = processes if processes > 1 else None
    began = time.perf_counter()
    texts = datasets.load_dataset("json", data_files=str(corpus), split="train", cache_dir=str(cache))
    tokenised = texts.map(
        lambda rows: tokenizer(rows["text"], return_special_tokens_mask=True),
        batched=True,
        remove_columns=texts.column_names,
        num_proc=count,
    )

    def group(rows: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {name: [number for row in column for number in row] for name, column in rows.items()}
        whole = len(joined["input_ids"]) // LENGTH * LENGTH
        return {
            name: [column[start : start + LENGTH] for start in range(0, whole, LENGTH)]
            for name, column in joined.items()
        }

    packed = tokenised.map(group, batched=True, num_proc=count)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "tokens": float(len(packed) * LENGTH), "sequences": float(len(packed))}


def _in_own_process(contender: str, corpus: Path, model: Path) -> dict[str, float]:
    """What a contender measured in a fresh process, and the most memory that it and its children had."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "benchmarks.tokenisation", "--contender", contender]
        command += ["--corpus", str(corpus), "--model", str(model), "--cache", cache]
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "true" if contender == "map_1" else "false"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        peak = _PeakMemory(process.pid)
        output, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(f"{contender} ended with {process.returncode}")
        return {**json.loads(output.splitlines()[-1]), "peak_rss_mib": peak.end()}


class _PeakMemory:
    """Samples the resident memory of a process and its children, each file page counted once per process."""

    def __init__(self, pid: int) -> None:
        self._process, self._peak, self._ended = psutil.Process(pid), 0, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def end(self) -> float:
        """The peak in MiB."""
        self._ended.set()
        self._thread.join()
        return self._peak / 2**20

    def _sample(self) -> None:
        while not self._ended.wait(0.05):
            try:
                every = [self._process, *self._process.children(recursive=True)]
                self._peak = max(self._peak, sum(one.memory_info().rss for one in every))
            except psutil.NoSuchProcess:
                continue  # one ended between the listing and the look


def _write_corpus(corpus: Path, texts: Path | None, size_mib: int) -> None:
    corpus.parent.mkdir()
    (corpus.parent / "validation.txt").write_text("One line.\n", encoding="utf-8")
    if texts is not None:
        packed = texts.suffix == ".gz"
        with gzip.open(texts) if packed else texts.open("rb") as source, corpus.open("wb") as target:
            shutil.copyfileobj(source, target)
        return
    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlcumwfgypbvk"))
    words = ["".join(rng.choice(letters, size)) for size in rng.integers(2, 11, _DISTINCT_WORDS)]
    written = 0
    with corpus.open("w", encoding="utf-8") as stream:
        while written < size_mib << 20:
            ranks = np.minimum(rng.zipf(1.2, 230), _DISTINCT_WORDS) - 1
            written += stream.write(
                json.dumps({"text": " ".join(words[rank] for rank in ranks) + "."}) + "\n"
            )


def _write_model(model: Path, corpus: Path, tokenizer: Path | None) -> None:
    from trainers.data import tokenizers

    model.mkdir()
    if tokenizer is not None:
        loaded = tokenizers.load(tokenizer)
        loaded.no_padding()
        loaded.no_truncation()
    else:
        with corpus.open(encoding="utf-8") as stream:
            sample = [json.loads(line)["text"] for line in itertools.islice(stream, 2000)]
        loaded = tokenizers.train_wordpiece(sample, 30_522)
    loaded.save(str(model / tokenizers.FILE))


def _cores() -> int:
    return max(2, len(os.sched_getaffinity(0)))


def main() -> None:
    """See the module."""
    parser = BENCHMARK.parser()
    parser.add_argument("--texts", type=Path, help="JSON lines with a field text, perhaps .gz")
    parser.add_argument("--tokenizer", type=Path, help="folder with a tokenizer")
    parser.size("--mib", SIZE_MIB, smoke=1, help="size of the synthetic text")
    parser.size("--rounds", ROUNDS, smoke=1)
    for hidden in ("--contender", "--corpus", "--model", "--cache"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.contender is None:
        figures = measure(given.texts, given.tokenizer, size_mib=given.mib, rounds=given.rounds)
        BENCHMARK.report(figures, given)
        return
    paths = Path(given.corpus), Path(given.model), Path(given.cache)
    if given.contender == "ours":
        print(json.dumps(_ours(*paths)))
    else:
        print(json.dumps(_map(*paths, int(given.contender.removeprefix("map_")))))


if __name__ == "__main__":
    main()

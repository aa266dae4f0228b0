"""Building a corpus of plain text: time, memory, and the same bytes after a kill.

    python -m benchmarks.corpus [--documents N] [--wikitext FOLDER]

A generated folder of text files, a document each, becomes ten shards by `trainers.data.corpus.build`, in a
process of its own: `documents_per_s` and `mib_per_s` are documents and MiB of text by its time, and
`peak_rss_mib` is the most memory that it held. Another process builds the same and is killed (SIGKILL) in the
middle; a third continues: `same_bytes_after_kill` says whether its files are those of the first, and
`continued_s` is its time. With `--wikitext`, `wikitext` has the same figures of a folder of WikiText,
whose articles are documents. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.options import Benchmark

BENCHMARK = Benchmark(
    "corpus",
    __doc__,
    fields=("documents_per_s", "mib_per_s", "peak_rss_mib", "same_bytes_after_kill", "continued_s"),
    also=("documents", "seconds", "was_killed", "wikitext"),
)
DOCUMENTS = 200_000
_FILES_PER_FOLDER = 1000
_DISTINCT_WORDS = 50_000


def measure(documents: int = DOCUMENTS, wikitext: Path | None = None) -> dict[str, Any]:
    """Builds the generated corpus three times, and WikiText where its folder is given."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_documents(folder / "texts", documents)
        figures = _compared(folder, f"{folder / 'texts'},documents=file")
        if wikitext is not None:
            settings = "documents=title,detokenise=wikitext"
            figures["wikitext"] = _compared(folder / "wikitext", f"{wikitext},{settings}")
    return figures


def _compared(folder: Path, source: str) -> dict[str, Any]:
    whole = json.loads(
        subprocess.run(_command(source, folder / "whole"), capture_output=True, check=True).stdout
    )
    process = subprocess.Popen(_command(source, folder / "cut"), stdout=subprocess.DEVNULL)
    while not (folder / "cut").exists():
        time.sleep(0.01)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(whole["seconds"] * 0.6)
    process.send_signal(signal.SIGKILL)
    killed = process.wait() == -signal.SIGKILL
    began = time.perf_counter()
    subprocess.run(_command(source, folder / "cut"), stdout=subprocess.DEVNULL, check=True)
    continued_s = time.perf_counter() - began
    return {
        "documents": whole["documents"],
        "documents_per_s": round(whole["documents"] / whole["seconds"]),
        "mib_per_s": round(whole["characters"] / 2**20 / whole["seconds"], 2),
        "seconds": round(whole["seconds"], 2),
        "peak_rss_mib": whole["peak_rss_mib"],
        "was_killed": killed,
        "continued_s": round(continued_s, 2),
        "same_bytes_after_kill": _digests(folder / "whole") == _digests(folder / "cut"),
    }


def _command(source: str, folder: Path) -> list[str]:
    return [sys.executable, "-m", "benchmarks.corpus", "--source", source, "--folder", str(folder)]


def _build(source: str, folder: Path) -> dict[str, Any]:
    from trainers.data.corpus import CorpusPlan, CorpusSource, build

    path, *settings = source.split(",")
    chosen = dict(setting.split("=") for setting in settings)
    began = time.perf_counter()
    manifest = build(CorpusPlan([CorpusSource(path, **chosen)], {"train": 0.8, "test": 0.2}), folder)
    seconds = time.perf_counter() - began
    return {
        "documents": manifest["sources"][0]["documents"],
        "characters": manifest["sources"][0]["characters"],
        "seconds": seconds,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("[a-z]*")}


def _write_documents(folder: Path, documents: int) -> None:
    """Writes documents of about 200 words, as unevenly frequent as those of English (Zipf's law)."""
    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlcumwfgypbvk"))
    words = ["".join(rng.choice(letters, size)) for size in rng.integers(2, 11, _DISTINCT_WORDS)]
    for number in range(documents):
        if number % _FILES_PER_FOLDER == 0:
            inside = folder / f"{number // _FILES_PER_FOLDER:05d}"
            inside.mkdir(parents=True)
        ranks = np.minimum(rng.zipf(1.2, 200), _DISTINCT_WORDS) - 1
        lines = (
            " ".join(words[rank] for rank in ranks[at : at + 20]).capitalize() for at in range(0, 200, 20)
        )
        (inside / f"{number:07d}.txt").write_text(".\n".join(lines) + ".\n", encoding="utf-8")


def main() -> None:
    """See the module."""
    parser = BENCHMARK.parser()
    parser.size("--documents", DOCUMENTS, smoke=300, help="documents of the generated folder")
    parser.add_argument("--wikitext", type=Path, help="folder with WikiText's files")
    for hidden in ("--source", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.folder is not None:
        print(json.dumps(_build(given.source, Path(given.folder))))
        return
    BENCHMARK.report(measure(given.documents, given.wikitext), given)


if __name__ == "__main__":
    main()

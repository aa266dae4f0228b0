"""Reads datasets from a hub of its own: `python -m tests.trainers.data.hub_reader FOLDER`.

A process of its own, because the libraries read the hub's address when they are imported.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.trainers.data.hub_server import serving

README = b"""---
configs:
- config_name: small
  default: true
  data_files:
  - split: train
    path: small/train-*
  - split: test
    path: small/test.jsonl
- config_name: large
  data_files: large/*.jsonl
---
Texts.
"""


def rows(*numbers: int, words: str = "tea in a warm cup") -> bytes:
    return "".join(json.dumps({"text": f"Text {n:03d} is about {words}."}) + "\n" for n in numbers).encode()


def main(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    files = {
        "README.md": README,
        "small/train-00000-of-00002.jsonl": rows(*range(30)),
        "small/train-00001-of-00002.jsonl": rows(*range(30, 50)),
        "small/test.jsonl": rows(*range(900, 910)),
        "large/all.jsonl": rows(*range(80)),
    }
    with serving() as hub:
        os.environ |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "0"}
        # After the address is set
        from trainers.config import TaskConfig, Workspace
        from trainers.data import corpus
        from trainers.data.sources import open_source, source_identity
        from trainers.errors import BadDataError

        def read(path: str, *, offline: bool = False, **fields: Any) -> dict[str, Any]:
            task = TaskConfig(name="mlm", path=path, **fields)
            workspace = Workspace(checkpoints="", cache=str(folder / "cache"), offline=offline)
            try:
                source = open_source(task, workspace)
                texts = {part: [row.text("text") for row in source.rows(part)] for part in source.parts}
            except BadDataError as error:
                return {"error": str(error)}
            return {"texts": texts, "identity": source_identity(source, task)}

        found["first"] = read("hub:team/texts")
        hub.push("team/texts", files)
        found["small"] = read("hub:team/texts")
        found["large"] = read("hub:team/texts:large")
        found["swapped"] = read("hub:team/texts", parts={"train": "test", "test": "train"})
        found["lost"] = read("hub:team/texts", parts={"train": "training"})
        plan = corpus.CorpusPlan(
            [corpus.CorpusSource("hub:team/texts")], {"train": 0.8, "test": 0.2}, 2, 20, 5
        )
        corpus._BATCH_DOCUMENTS, corpus._REPORTED = 20, 1

        def cut_off(progress: corpus.BuildProgress) -> None:
            if progress.documents == 35:
                raise KeyboardInterrupt

        corpus.build(plan, folder / "whole")
        try:
            corpus.build(plan, folder / "cut", cut_off)
        except KeyboardInterrupt:
            found["cut"] = True
        # Same numbers of rows and bytes, other words
        hub.push("team/texts", {**files, "small/train-00001-of-00002.jsonl": rows(*range(50, 70))})
        corpus.build(plan, folder / "cut")
        found["changed"] = read("hub:team/texts")
    found["offline"] = read("hub:team/texts", offline=True)
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))

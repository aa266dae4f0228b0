"""What is said of data that was looked at, and a spec to start from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainers.data.storage import Place
    from trainers.tasks.inspection import DataContents

SKIPPED_SHOWN = 3  # Rows of a part that cannot be used, that are listed
_CUT_SHARE = 0.05  # Share of the examples that a suggested `task.max_length` may cut


def starting_spec(contents: DataContents, roots: Sequence[Place]) -> dict[str, Any] | None:
    """Returns a spec for the likeliest task; None = no task can read the data."""
    if not contents.proposals:
        return None
    best = contents.proposals[0]
    task = {"name": best.task["name"], "path": path_in_spec(best.path, roots)}
    task.update({name: value for name, value in best.task.items() if name != "name"})
    lengths = contents.parts["train"].lengths if "train" in contents.parts else None
    if lengths is not None and best.cuts:
        fitting = [length for length, share in lengths.cut.items() if share <= _CUT_SHARE]
        task["max_length"] = fitting[0] if fitting else max(lengths.cut)
    name = "".join(character if character.isalnum() else "-" for character in contents.path.stem.lower())
    return {
        "name": f"{name.strip('-')[:60] or 'data'}-first-run",
        "task": task,
        "model": {"name": "mini"},
        "optimizer": {"name": "adamw", "learning_rate": 3.0e-4},
        "batch": {"global_size": 32},
        "length": {"epochs": 3},
        "hardware": "cpu",
        "seeds": [0],
    }


def path_in_spec(path: Path, roots: Sequence[Place]) -> str:
    """Returns a path relative to the data root that contains it."""
    for root in roots:
        if isinstance(root, Path) and path.is_relative_to(root) and path != root:
            return str(path.relative_to(root))
    return str(path)


def data_document(contents: DataContents) -> dict[str, Any]:
    return {
        "path": os.fspath(contents.path),
        "files": contents.files,
        "columns": contents.columns,
        "parts": {
            name: {
                "files": part.files,
                "file_count": part.file_count,
                "rows": part.rows,
                "whole": part.whole,
                "usable": part.usable,
                "empty_texts": part.empty,
                "duplicates": part.duplicates,
                "labels": part.labels,
                "numbers": {
                    column: dict(zip(("least", "mean", "greatest"), numbers, strict=True))
                    for column, numbers in part.numbers.items()
                },
                "lengths": part.lengths,
                "skipped": part.skipped.counts,
                "mistakes": [*part.skipped.first[:SKIPPED_SHOWN], *part.mistakes],
                "remarks": part.remarks,
            }
            for name, part in contents.parts.items()
        },
        "unused": contents.unused,
        "shared": contents.shared,
        "token_count": contents.token_count,
        "tasks": [{**one.task, "path": os.fspath(one.path)} for one in contents.proposals],
        "refused": contents.refused,
    }

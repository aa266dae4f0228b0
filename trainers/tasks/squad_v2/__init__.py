"""Questions about a text that may not answer them: SQuAD 2.0 (Rajpurkar, Jia and Liang, 2018)."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from trainers.data.allowance import read_start
from trainers.data.formats import Row, ending, read_json
from trainers.data.layouts import SourcePart, files_in
from trainers.errors import BadDataError
from trainers.model_kinds.heads import SpanHead
from trainers.tasks.info import MAIN_FRACTION, OwnFields, Score, TaskInfo, Trial, columns_named

_OFFICIAL = re.compile(rb'(\xef\xbb\xbf)?\s*\{\s*"(version|data)"\s*:')
_ENDS = (".json", ".json.gz")
_SNIFFED_BYTES = 4096
_OF_SOME = Score("1", better="higher", share="some")


def official(path: Path) -> Mapping[str, SourcePart] | None:
    """Finds `train-v2.0.json`, perhaps with `dev-` and `test-v2.0.json`, or one such file."""
    return files_in(path, _is_official, _named, read_squad)


def read_squad(path: Path) -> Iterator[Row]:
    tree = read_json(path, "JSON in the official SQuAD format")
    for article, in_article in _members(tree, "data", str(path), ", "):
        title = article.get("title")
        for paragraph, in_paragraph in _members(article, "paragraphs", in_article, "."):
            for question, where in _members(paragraph, "qas", in_paragraph, "."):
                yield Row({**question, "title": title, "context": paragraph.get("context")}, where)


def _members(node: Any, name: str, where: str, joint: str) -> Iterator[tuple[dict[str, Any], str]]:
    if not isinstance(node, dict) or not isinstance(node.get(name), list):
        raise BadDataError(f"{where}, field {name}: not a list; expected the official SQuAD format")
    for i, member in enumerate(node[name]):
        place = f"{where}{joint}{name}[{i}]"
        if not isinstance(member, dict):
            raise BadDataError(f"{place}: a JSON {type(member).__name__}, not an object")
        yield member, place


def _named(folder: Path, name: str) -> list[Path]:
    files = sorted(file for end in _ENDS for file in folder.glob(f"{name}-v*{end}") if file.is_file())
    files += (file for end in _ENDS if _is_official(file := folder / f"{name}{end}"))
    if len(files) > 1:
        shown = ", ".join(file.name for file in files)
        raise BadDataError(f"{folder}: {shown} could each be the {name} part; keep only one")
    return files


def _is_official(path: Path) -> bool:
    if ending(path) not in _ENDS or not path.is_file():
        return False
    return _OFFICIAL.match(read_start(path, _SNIFFED_BYTES)) is not None


class SpanFields(OwnFields):
    stride: int | None = Field(default=None, ge=1, le=512)
    """Tokens that neighbouring windows share; unset = 128, or a third of short windows."""
    max_answer_tokens: int = Field(default=30, ge=1, le=512)
    """Longest answer, in tokens."""

    def check(self, max_length: int) -> None:
        if self.stride is not None and self.stride > max_length // 2:
            raise ValueError(
                f"stride {self.stride} is more than half of max_length {max_length}; "
                f"lower task.stride to {max_length // 2} or raise task.max_length"
            )


SQUAD_V2 = TaskInfo(
    name="squad_v2",
    summary="the span of a text that answers a question, or none",
    implementation="trainers.tasks.squad_v2.task:SquadV2",
    head=SpanHead,
    scores={
        "f1": MAIN_FRACTION,
        "exact_match": MAIN_FRACTION,
        "f1_has_answer": _OF_SOME,
        "f1_best_span": _OF_SOME,
        "exact_match_has_answer": _OF_SOME,
        "exact_match_no_answer": _OF_SOME,
        "null_threshold": Score("1", tuned=True),
    },
    headline="f1",
    own_fields=SpanFields,
    counted="questions",
    columns=("id", "question", "context", "answers", "title", "is_impossible"),
    labels=("answers",),
    trial=Trial(each="question", shared=("context",), shown="text"),
    layouts=(official,),
    guess=columns_named("id", "question", "context", "answers"),
    hub_id="rajpurkar/squad_v2",
    hub_examples=131_944,  # windows at length 384
)

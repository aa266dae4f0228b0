"""Specs to begin with: the files of the folder `examples`, in a checkout or as installed with the package."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from service.config.settings import EXAMPLE_DATA, Settings
from service.domain.serialization import Serializable


@dataclass(frozen=True, slots=True)
class Example(Serializable):
    """A spec to begin with."""

    name: str  # Name of its file, without the suffix
    title: str  # First sentence of its comment: the question that it answers
    text: str  # The spec, with comments


_SENTENCE = re.compile(r".*?[.?](?=\s|$)", re.DOTALL)


def shared_folder(name: str) -> Path | None:
    """Returns the folder next to the sources, or where pip put it; None = not installed."""
    beside, *above = Path(__file__).parents[2:]
    # Of a virtual environment, a user's packages or `pip install --target`.
    installed = (folder / "share" / "stillhouse" / name for folder in (beside, *above))
    return next((folder for folder in (beside / name, *installed) if folder.is_dir()), None)


def examples_folder() -> Path | None:
    return shared_folder("examples")


def examples() -> Iterator[Example]:
    folder = examples_folder()
    for path in sorted(folder.glob("*.yaml")) if folder is not None else ():
        text = path.read_text(encoding="utf-8")
        yield Example(path.stem, _title(text), text)


def keep_demo_texts(settings: Settings) -> None:
    """Writes the texts of the first example into the data root that every installation has, once."""
    texts = settings.data_dir / EXAMPLE_DATA / "demo-texts"
    if not texts.exists():
        write_demo_texts(texts)


def write_demo_texts(folder: Path) -> None:
    from trainers.data.synthetic import write_corpus

    folder.mkdir(parents=True, exist_ok=True)
    write_corpus(folder, train=800, test=400, seed=0)


def _title(text: str) -> str:
    comment = re.match(r"(?:#.*\n)*", text)
    words = " ".join(line.lstrip("# ") for line in (comment[0] if comment else "").splitlines())
    sentence = _SENTENCE.match(words)
    return sentence[0] if sentence else words.strip()

"""A corpus of plain text out of several sources: documents cleaned, merged, split by hash, written as shards.

Documents are taken from the sources in turn, by weight. The text of a document alone decides which part
it belongs to. After every batch of documents, texts are appended to the shards, and then their lengths, the
places in the sources and the hashes of known documents are stored in one transaction. A build that was killed
cuts the shards to those lengths and continues there, so that it writes the bytes of one that was not.
"""

import gzip
import hashlib
import json
import os
import re
import sqlite3
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any

import orjson
from filelock import FileLock, Timeout
from pydantic import TypeAdapter

from trainers.data.allowance import Allowance, Spent, read_start, within
from trainers.data.cache import digest_of, sync
from trainers.data.formats import READERS, Row, ending, read_lines
from trainers.data.paths import HUB, UnusablePath, id_on_hub
from trainers.data.prose import detokenised, packed, paragraphs, sentences
from trainers.data.selection import normal
from trainers.data.sources import open_stream
from trainers.errors import BadDataError

MANIFEST = "manifest.json"
LONGEST = 4 << 20  # Characters of a document; longer ones are continued as further documents
_LONGEST_LINE = 32 << 20  # Bytes of a line, and of a few rows of a Parquet file: what is held in memory
_BATCH_BYTES, _BATCH_DOCUMENTS = 32 << 20, 50_000
_FORMAT = 1  # Grows when the same documents give other texts
_STATE, _LOCK, _DRAFT = "unfinished.sqlite", ".lock", ".draft"
_TEXTS = (".txt", ".txt.gz", ".text", ".tokens")
_SNIFFED_BYTES = 1 << 16
_TITLE = re.compile(r" ?= [^=].* = ?$")
_EXPANSION = {".gz": 3, ".parquet": 2}  # About how much longer the text of a file is than the file
_REPORTED = 256  # Documents between two reports of the progress


# -- What is asked for -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CorpusSource:
    path: str  # A file, a folder of files, or `hub:<id>`
    weight: float = 1.0  # Share of the characters that it is read by, relative to the other sources
    documents: str = "auto"  # What a document of a plain text file is: a name in `DOCUMENTS`, or auto
    column: str = "text"  # Column of tables that has the text
    detokenise: str = "none"  # See `prose.DETOKENISERS`


@dataclass(frozen=True, slots=True)
class CorpusPlan:
    sources: Sequence[CorpusSource]
    shares: Mapping[str, float]  # Of the documents, by part; their sum is 1
    shards: int = 10  # Of all parts together
    words: int = 96  # Most words of a text, except of a single longer sentence
    least_words: int = 20  # Documents with fewer are left out
    seed: int = 0  # Which shard of its part a document is in
    stop: str = "last"  # Ends with the first source that is exhausted, or with the last one

    def shard_counts(self) -> dict[str, int]:
        counts = {part: max(1, round(self.shards * share)) for part, share in self.shares.items()}
        largest = max(counts, key=lambda part: counts[part])
        counts[largest] += self.shards - sum(counts.values())
        return counts


@dataclass(slots=True)
class SourceCounts:
    documents: int = 0  # Read
    characters: int = 0
    kept: int = 0
    too_short: int = 0
    duplicates: int = 0
    digest: str = ""  # Of all documents that were read, in order


@dataclass(slots=True)
class ShardCounts:
    documents: int = 0
    texts: int = 0
    words: int = 0
    size_bytes: int = 0


@dataclass(slots=True)
class _BuildState:
    places: list[dict[str, Any]]  # Where the next document of each source is
    ended: list[bool]
    sources: list[SourceCounts]
    shards: dict[str, ShardCounts] = field(default_factory=dict)  # By name of the file


# -- Documents -------------------------------------------------------------------------------------


def _blocks(path: Path, begins: Callable[[str], bool], *, with_it: bool) -> Iterator[str]:
    block: list[str] = []
    size = 0
    for line, _ in read_lines(path):
        begin = begins(line)
        if (begin or size > LONGEST) and block:
            yield "\n".join(block)
            block, size = [], 0
        if with_it or not begin:
            block.append(line)
            size += len(line)
    if block:
        yield "\n".join(block)


DOCUMENTS: Mapping[str, Callable[[Path], Iterator[str]]] = {
    "line": lambda path: (line for line, _ in read_lines(path) if line.strip()),
    "paragraph": lambda path: _blocks(path, lambda line: not line.strip(), with_it=False),
    "file": lambda path: _blocks(path, lambda line: False, with_it=True),
    "title": lambda path: _blocks(path, lambda line: _TITLE.match(line) is not None, with_it=True),
    "doc": lambda path: _blocks(path, lambda line: line.startswith(("<doc ", "</doc>")), with_it=False),
}
"""Documents of a plain text file: its lines, what is between blank lines, the file, what follows a title of
WikiText (`= Tea =`), or what WikiExtractor writes between `<doc ...>` and `</doc>`."""


def _usual_documents(path: Path) -> str:
    start = read_start(path, _SNIFFED_BYTES).decode("utf-8", "replace").split("\n")
    if start[0].startswith("<doc "):
        return "doc"
    if any(map(_TITLE.match, start)):
        return "title"
    if path.suffix != ".gz" and path.stat().st_size <= LONGEST:
        return "file"
    return "paragraph" if any(not line.strip() for line in start[:-1]) else "line"


class _LineAllowance(Allowance):
    """Bounds what is read at once instead of in all, so that memory does not depend on the data."""

    rows_at_once = 16

    def __init__(self) -> None:
        super().__init__(_LONGEST_LINE, 0.0)

    def take(self, size_bytes: int) -> None:
        if size_bytes > self.left_bytes:
            raise Spent


class _LocalDocuments:
    def __init__(self, source: CorpusSource, place: dict[str, Any]) -> None:
        self.place = place or {"file": 0, "document": 0}
        self._source, self._root = source, Path(source.path)

    @staticmethod
    def identity(source: CorpusSource) -> dict[str, Any]:
        if not Path(source.path).exists():
            raise BadDataError(f"source {source.path}: does not exist; give a file, a folder or {HUB}<id>")
        count = size = characters = 0
        for file in _files_under(Path(source.path)):
            status = file.stat()
            count, size = count + 1, size + status.st_size
            characters += status.st_size * _EXPANSION.get(file.suffix, 1)
        if not size:
            raise BadDataError(
                f"source {source.path}: no text in it; its files end in {', '.join((*_TEXTS, *READERS))}"
            )
        return {"files": count, "size_bytes": size, "about_characters": characters}

    def __iter__(self) -> Iterator[str]:
        place = self.place
        for file in islice(_files_under(self._root), place["file"], None):
            try:
                for text in islice(self._texts(file), place["document"], None):
                    place["document"] += 1
                    yield text
            except Spent:
                raise BadDataError(
                    f"{file}, behind document {place['document']}: a line or row of more than "
                    f"{_LONGEST_LINE >> 20} MiB, or no file but a device or pipe; divide it, or leave it out"
                ) from None
            place.update(file=place["file"] + 1, document=0)

    def _texts(self, file: Path) -> Iterator[str]:
        if ending(file) in READERS:
            return (_text_of(row, self._source.column) for row in READERS[ending(file)](file))
        kind = self._source.documents
        return DOCUMENTS[_usual_documents(file) if kind == "auto" else kind](file)


def _files_under(path: Path) -> Iterator[Path]:
    # One folder at a time, so that memory does not grow with their number.
    if path.is_file():
        yield path
        return
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        if entry.name.startswith((".", "_")):
            continue
        if entry.is_dir():
            yield from _files_under(Path(entry.path))
        elif ending(file := Path(entry.path)) in READERS or ending(file) in _TEXTS:
            yield file


class _HubDocuments:
    def __init__(self, source: CorpusSource, place: dict[str, Any]) -> None:
        self._name, self._column = self._id(source), source.column
        self._stream, self._revision = open_stream(self._name, place.get("revision"))
        if place:
            self._stream.load_state_dict(place["stream"])
        self._number = place.get("document", 0)

    @staticmethod
    def identity(source: CorpusSource) -> dict[str, Any]:
        _HubDocuments._id(source)
        return {}

    @staticmethod
    def _id(source: CorpusSource) -> str:
        try:
            return id_on_hub(source.path, "dataset")
        except UnusablePath as error:
            raise BadDataError(f"source {error}") from None

    @property
    def place(self) -> dict[str, Any]:
        return {"revision": self._revision, "stream": self._stream.state_dict(), "document": self._number}

    def __iter__(self) -> Iterator[str]:
        for row in self._stream:
            self._number += 1
            yield _text_of(Row(row, f"{HUB}{self._name}, row {self._number}"), self._column)


def _text_of(row: Row, column: str) -> str:
    value = row.fields.get(column)
    return value if isinstance(value, str) else row.text(column)


def _kind_of(source: CorpusSource) -> type[_LocalDocuments] | type[_HubDocuments]:
    return _HubDocuments if source.path.startswith(HUB) else _LocalDocuments


# -- The build -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BuildProgress:
    documents: int  # Read so far
    characters: int
    kept: int
    expected: int | None  # About how many characters there are; None = unknown, as of the hub


def build(
    plan: CorpusPlan, folder: Path, report: Callable[[BuildProgress], None] = lambda progress: None
) -> dict[str, Any]:
    """Writes the corpus to a folder and returns its manifest; continues a build that was cut off.

    Raises `BadDataError` for a source that cannot be read, and for a folder with something else in it.
    """
    identity = {
        "format": _FORMAT,
        **{name: value for name, value in asdict(plan).items() if name != "sources"},
        "sources": [{**asdict(source), **_kind_of(source).identity(source)} for source in plan.sources],
    }
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / _LOCK, timeout=0), within(_LineAllowance()):
            if (folder / MANIFEST).exists():
                return _known_manifest(folder, identity)
            others = sorted(path.name for path in folder.iterdir() if path.name not in (_LOCK, _STATE))
            if others and not (folder / _STATE).exists():
                raise BadDataError(
                    f"{folder}: holds {others[0]}, which is not of a corpus; give a new or empty folder"
                )
            with closing(sqlite3.connect(folder / _STATE)) as database:
                manifest = _CorpusBuild(plan, folder, identity, database, report).run()
            (folder / _STATE).unlink()
            return manifest
    except Timeout:
        raise BadDataError(f"{folder}: another process is building there; wait for it") from None


def _known_manifest(folder: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
    _require_same(folder, manifest["plan"], identity, "a corpus", "give another folder")
    (folder / _STATE).unlink(missing_ok=True)
    return manifest


def _require_same(
    folder: Path, then: Mapping[str, Any], now: Mapping[str, Any], what: str, advice: str
) -> None:
    for name, value in json.loads(json.dumps(now)).items():
        if then.get(name) != value:
            was, now_is = json.dumps(then.get(name)), json.dumps(value)
            raise BadDataError(
                f"{folder}: holds {what} with other settings: {name} was {was[:300]} and is {now_is[:300]}; "
                f"{advice}"
            )


class _CorpusBuild:
    def __init__(
        self,
        plan: CorpusPlan,
        folder: Path,
        identity: Mapping[str, Any],
        database: sqlite3.Connection,
        report: Callable[[BuildProgress], None],
    ) -> None:
        self._plan, self._folder, self._database, self._report = plan, folder, database, report
        self._identity = identity
        self._files = {
            part: [f"{part}-{number:05d}-of-{count:05d}.jsonl.gz" for number in range(count)]
            for part, count in plan.shard_counts().items()
        }
        self._state = self._stored() or self._first()
        self._streams = [
            _kind_of(source)(source, place)
            for source, place in zip(plan.sources, self._state.places, strict=True)
        ]
        self._readers = [iter(stream) for stream in self._streams]
        # Not lists of rows, which would be strewn over a heap from which large texts have come and gone.
        self._pending: dict[str, bytearray] = defaultdict(bytearray)
        self._digests = [hashlib.sha256() for _ in plan.sources]
        self._batch_bytes = self._batch_documents = 0
        sizes = [of.get("about_characters") for of in identity["sources"]]
        self._expected = None if None in sizes else sum(sizes)

    def run(self) -> dict[str, Any]:
        while (number := self._next_source()) is not None:
            text = next(self._readers[number], None)
            if text is None:
                self._state.ended[number] = True
                continue
            self._take(number, text)
            if self._batch_bytes >= _BATCH_BYTES or self._batch_documents >= _BATCH_DOCUMENTS:
                self._store()
        self._store()
        return self._finish()

    def _next_source(self) -> int | None:
        state = self._state
        if any(state.ended) and self._plan.stop == "first":
            return None
        behind = (
            (counts.characters / source.weight, number)
            for number, (source, counts) in enumerate(zip(self._plan.sources, state.sources, strict=True))
            if not state.ended[number]
        )
        return min(behind, default=(0.0, None))[1]

    def _take(self, number: int, raw: str) -> None:
        source, counts = self._plan.sources[number], self._state.sources[number]
        counts.documents += 1
        counts.characters += len(raw)
        self._batch_documents += 1
        self._digests[number].update(_digest(raw))
        for begin in range(0, max(1, len(raw)), LONGEST):
            # Tokenised corpora have a sentence or a paragraph per line.
            text = detokenised(raw[begin : begin + LONGEST], source.detokenise)
            self._write(paragraphs(text, wrapped=source.detokenise == "none"), counts)
        if counts.documents % _REPORTED == 0:
            self._report(self.progress)

    def _write(self, text: Sequence[str], counts: SourceCounts) -> None:
        words = sum(paragraph.count(" ") + 1 for paragraph in text)
        if words < self._plan.least_words:
            counts.too_short += 1
            return
        digest = _digest(" ".join(map(normal, text)))
        key = int.from_bytes(digest, "little", signed=True)
        if not self._database.execute("INSERT OR IGNORE INTO known VALUES (?)", (key,)).rowcount:
            counts.duplicates += 1
            return
        counts.kept += 1
        file = self._file_of(digest)
        shard, rows = self._state.shards[file], self._pending[file]
        shard.documents += 1
        shard.words += words
        for packed_text in packed(chain.from_iterable(map(sentences, text)), self._plan.words):
            row = orjson.dumps({"text": packed_text}, option=orjson.OPT_APPEND_NEWLINE)
            rows += row
            shard.texts += 1
            self._batch_bytes += len(row)

    def _file_of(self, digest: bytes) -> str:
        """Returns the shard of a document; the seed decides only which one of its part."""
        # From the end, so that a validation part leaves the test part as it is.
        parts = list(self._plan.shares)[::-1]
        limits = list(accumulate(self._plan.shares[part] for part in parts))
        at = bisect_right(limits, int.from_bytes(digest, "little") / 2**64)
        files = self._files[parts[min(at, len(parts) - 1)]]
        drawn = hashlib.blake2b(digest, digest_size=8, key=self._plan.seed.to_bytes(8, "little")).digest()
        return files[int.from_bytes(drawn, "little") % len(files)]

    @property
    def progress(self) -> BuildProgress:
        every = self._state.sources
        return BuildProgress(
            sum(counts.documents for counts in every),
            sum(counts.characters for counts in every),
            sum(counts.kept for counts in every),
            self._expected,
        )

    # -- What outlives the process ---------------------------------------------------------------

    def _first(self) -> _BuildState:
        state = _BuildState([{} for _ in self._plan.sources], [False] * len(self._plan.sources), [])
        state.sources = [SourceCounts() for _ in self._plan.sources]
        state.shards = {file: ShardCounts() for files in self._files.values() for file in files}
        for left_over in self._folder.glob(f"*{_DRAFT}"):
            left_over.unlink()
        for file in state.shards:
            (self._folder / f"{file}{_DRAFT}").write_bytes(b"")
        return state

    def _stored(self) -> _BuildState | None:
        self._database.execute("PRAGMA cache_size = -65536")  # KiB
        self._database.execute("CREATE TABLE IF NOT EXISTS known (hash INTEGER PRIMARY KEY)")
        self._database.execute("CREATE TABLE IF NOT EXISTS state (plan TEXT, content TEXT)")
        row = self._database.execute("SELECT plan, content FROM state").fetchone()
        if row is None:
            return None
        _require_same(
            self._folder, json.loads(row[0]), self._identity, "an unfinished build", "continue with those, "
            "or remove the folder",
        )  # fmt: skip
        state = TypeAdapter(_BuildState).validate_json(row[1])
        for file, counts in state.shards.items():
            draft = self._folder / f"{file}{_DRAFT}"
            path = draft if draft.exists() else self._folder / file
            if not path.exists() or path.stat().st_size < counts.size_bytes:
                raise BadDataError(
                    f"{path}: shorter than when it was written; remove {self._folder}, start again"
                )
            os.truncate(path, counts.size_bytes)
        return state

    def _store(self) -> None:
        for file, rows in self._pending.items():
            # A member of its own for each batch, without a time: the same rows are the same bytes.
            content = gzip.compress(rows, 6, mtime=0)
            path = self._folder / f"{file}{_DRAFT}"
            with path.open("ab") as stream:
                stream.write(content)
            sync(path)
            self._state.shards[file].size_bytes += len(content)
        for counts, digest in zip(self._state.sources, self._digests, strict=True):
            counts.digest = digest_of([counts.digest, digest.hexdigest()])
        self._state.places = [stream.place for stream in self._streams]
        self._database.execute("DELETE FROM state")
        self._database.execute(
            "INSERT INTO state VALUES (?, ?)", (json.dumps(self._identity), json.dumps(asdict(self._state)))
        )
        self._database.commit()
        self._pending.clear()
        self._digests = [hashlib.sha256() for _ in self._plan.sources]
        self._batch_bytes = self._batch_documents = 0
        self._report(self.progress)

    def _finish(self) -> dict[str, Any]:
        shards = self._state.shards
        parts = {part: Counter[str]() for part in self._files}
        for part, files in self._files.items():
            for file in files:
                parts[part].update(asdict(shards[file]))
            if not parts[part]["documents"]:
                read = self.progress
                raise BadDataError(
                    f"{self._folder}: {read.kept} of {read.documents} documents kept, none for {part}; "
                    "add documents, or lower the fewest words of a document"
                )
        described = []
        for file, counts in shards.items():
            if (draft := self._folder / f"{file}{_DRAFT}").exists():
                os.replace(draft, self._folder / file)
            with (self._folder / file).open("rb") as stream:
                sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
            described.append({"file": file, **asdict(counts), "sha256": sha256})
        revisions = [place.get("revision") for place in self._state.places]
        manifest = {
            "plan": json.loads(json.dumps(self._identity)),
            "sources": [
                {"path": source.path, **({"revision": revision} if revision else {}), **asdict(counts)}
                for source, counts, revision in zip(
                    self._plan.sources, self._state.sources, revisions, strict=True
                )
            ],
            "parts": {part: {"shards": len(self._files[part]), **counts} for part, counts in parts.items()},
            "shards": described,
        }
        draft = self._folder / f"{MANIFEST}{_DRAFT}"
        draft.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        sync(draft)
        os.replace(draft, self._folder / MANIFEST)
        sync(self._folder)
        return manifest


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()

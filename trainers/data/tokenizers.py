"""Text to token ids: the model's own tokenizer, or a WordPiece vocabulary trained on the texts.

A tokenizer is what `tokenizer.json` describes, with the special tokens that the settings next to it name.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from trainers.errors import BadSpecError

FILE = "tokenizer.json"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # Special tokens of a trained vocabulary, by id
SETTINGS = ("special_tokens_map.json", "tokenizer_config.json")
"""Files that name a tokenizer's special tokens; the later one decides."""
_ROLES: Mapping[str, tuple[str, ...]] = {
    "pad_token": ("[PAD]", "<pad>"),
    "unk_token": ("[UNK]", "<unk>"),
    "cls_token": ("[CLS]", "<s>"),
    "sep_token": ("[SEP]", "</s>"),
    "mask_token": ("[MASK]", "<mask>"),
}
"""Special tokens by what they are for, with the names they have where no file gives one."""
_SENTENCEPIECE = ("sentencepiece", "google.protobuf")
SOURCES: Mapping[str, tuple[str, ...]] = {
    FILE: (),
    "vocab.txt": (),
    "vocab.json": (),
    "spm.model": _SENTENCEPIECE,
    "sentencepiece.bpe.model": _SENTENCEPIECE,
}
"""Files that a tokenizer is made of, the first that exists, and packages that its conversion needs."""
_BYTE_LEVEL_SPACE, _SPACE = "\u0120", "\u2581"
"""What a piece begins with that begins a word, in byte-level BPE and in SentencePiece."""
_ALPHABET = 1000  # Most characters that a trained vocabulary spells words with


def train_wordpiece(texts: Sequence[str], size: int) -> Tokenizer:
    """Returns an uncased BERT tokenizer with a vocabulary of at most `size` pieces of these texts.

    The same texts give the same vocabulary: the library breaks ties by the numbers of the pieces of one
    character, which it would take from a hash table, so that it is given all of them in a fixed order.
    """
    draft = _bert(models.WordPiece(unk_token="[UNK]"), lowercase=True)
    alphabet = _alphabet(texts, draft)
    first = [*SPECIAL, *alphabet, *(f"##{character}" for character in alphabet)]
    draft.train_from_iterator(
        iter(texts),
        trainers.WordPieceTrainer(
            vocab_size=size,
            min_frequency=2,
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            special_tokens=first,
            show_progress=False,
        ),
    )
    # A fresh tokenizer, in which single characters are not special tokens.
    vocabulary = draft.get_vocab(with_added_tokens=False)
    return _framed(_bert(models.WordPiece(vocabulary, unk_token="[UNK]"), lowercase=True))


def _alphabet(texts: Sequence[str], tokenizer: Tokenizer) -> list[str]:
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(tokenizer.normalizer.normalize_str(text))
    characters = (character for character in counts if not character.isspace())
    return sorted(sorted(characters, key=lambda one: (-counts[one], one))[:_ALPHABET])


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Returns one more than the largest id, as numbers may be left out."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    folder: Path
    names: Mapping[str, str]  # By what they are for, such as `mask_token`; without those that it lacks
    ids: Mapping[str, int]
    every: frozenset[int]  # Ids of all special tokens, also of those that are for nothing in particular

    @classmethod
    def of(cls, tokenizer: Tokenizer, folder: Path) -> SpecialTokens:
        settings, vocabulary = _settings(folder), tokenizer.get_vocab()
        names = {}
        for role, usual in _ROLES.items():
            setting = settings.get(role)
            own = setting.get("content") if isinstance(setting, dict) else setting
            in_vocabulary = (name for name in (own, *usual) if isinstance(name, str) and name in vocabulary)
            if (name := next(in_vocabulary, None)) is not None:
                names[role] = name
        ids = {role: vocabulary[name] for role, name in names.items()}
        added = tokenizer.get_added_tokens_decoder().items()
        every = frozenset(ids.values()) | {number for number, one in added if one.special}
        return cls(folder, names, ids, every)

    def id_of(self, role: str) -> int:
        if role not in self.ids:
            names = " or ".join(_ROLES[role])
            raise BadSpecError(
                f"{self.folder}: the tokenizer has no {role}; name one of its vocabulary in "
                f"tokenizer_config.json (usually {names})"
            )
        return self.ids[role]


def _settings(folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for file in (folder / name for name in SETTINGS):
        if not file.is_file():
            continue
        try:
            fields = json.loads(file.read_text(encoding="utf-8-sig"))
        except ValueError as error:
            raise BadSpecError(f"{file}: cannot be read ({error})") from None
        if isinstance(fields, dict):
            settings.update({name: value for name, value in fields.items() if value is not None})
    return settings


def load(folder: Path) -> Tokenizer:
    """Returns the fast tokenizer of a model folder: `tokenizer.json`, or built from what it has instead."""
    file, vocabulary = folder / FILE, folder / "vocab.txt"
    try:
        if file.is_file():
            tokenizer = Tokenizer.from_file(str(file))
            if not tokenizer.num_special_tokens_to_add(is_pair=False):
                raise BadSpecError(
                    "no post_processor adds the special tokens before and after a text, such as [CLS] and "
                    "[SEP]; add the model's, or give vocab.txt instead"
                )
            return tokenizer
        if vocabulary.is_file():
            config = _settings(folder)
            pieces = vocabulary.read_text(encoding="utf-8").rstrip("\n").split("\n")
            model = models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]")
            return _framed(_bert(model, lowercase=bool(config.get("do_lower_case", True))))
        if file_in(folder).is_file():
            return _converted(folder)
    except Exception as error:  # the library raises plain Exception
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadSpecError(f"{folder}: unusable tokenizer ({reason})") from None
    raise BadSpecError(f"{folder}: no tokenizer; expected tokenizer.json or vocab.txt")


def _converted(folder: Path) -> Tokenizer:
    # Imported here: it loads the registry of all models, and few folders lack a tokenizer.json.
    from transformers import AutoTokenizer

    file = file_in(folder)
    for package in SOURCES[file.name]:
        if not _installed(package):
            raise BadSpecError(
                f"{file.name} needs the package {package.rpartition('.')[2]}, which is not installed here; "
                "install it on every worker, or save the model with a fast tokenizer, which writes "
                "tokenizer.json"
            )
    try:
        converted: Tokenizer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True
        ).backend_tokenizer
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise BadSpecError(
            f"{file.name} cannot be converted here ({reason}); save the model with a fast "
            "tokenizer, which writes tokenizer.json"
        ) from None
    return converted


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


def file_in(folder: Path) -> Path:
    return next((file for name in SOURCES if (file := folder / name).is_file()), folder / "vocab.txt")


def write(folder: Path, file: Path) -> None:
    """Writes a tokenizer as `tokenizer.json`, whatever it comes from, and the names of its special tokens."""
    if file.name == FILE:
        (folder / FILE).write_bytes(file.read_bytes())
    else:
        load(file.parent).save(str(folder / FILE))
    names = _special_names(file.parent, file.stat().st_mtime_ns)
    (folder / SETTINGS[0]).write_text(json.dumps(names, indent=1), encoding="utf-8")


@lru_cache(maxsize=4)
def _special_names(folder: Path, modified_ns: int) -> dict[str, str]:
    """Returns special tokens by what they are for; remembered, because large tokenizers load slowly."""
    return dict(SpecialTokens.of(load(folder), folder).names)


def continues_word(tokenizer: Tokenizer) -> Callable[[str], bool]:
    """Returns what tells the pieces that continue a word from those that begin one."""
    described = json.loads(tokenizer.to_str())
    if described["model"]["type"] == "WordPiece":
        prefix = str(described["model"]["continuing_subword_prefix"])
        return lambda piece: piece.startswith(prefix)
    begins = _BYTE_LEVEL_SPACE if '"ByteLevel"' in json.dumps(described["pre_tokenizer"]) else _SPACE
    return lambda piece: not piece.startswith(begins)


def _bert(model: models.WordPiece, *, lowercase: bool) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _framed(tokenizer: Tokenizer) -> Tokenizer:
    separator, begin = (tokenizer.token_to_id(token) for token in ("[SEP]", "[CLS]"))
    if separator is None or begin is None:
        missing = "[SEP]" if separator is None else "[CLS]"
        raise BadSpecError(f"the vocabulary has no {missing}; use the tokenizer of a BERT")
    tokenizer.add_special_tokens([token for token in SPECIAL if tokenizer.token_to_id(token) is not None])
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", separator), ("[CLS]", begin))
    return tokenizer

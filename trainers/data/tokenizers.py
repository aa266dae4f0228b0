"""Text to token ids: the model's own tokenizer, or a WordPiece vocabulary trained on the texts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from trainers.errors import BadSpecError

FILE = "tokenizer.json"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Special tokens; their ids are their places here."""
_ALPHABET = 1000
"""Most characters that a trained vocabulary spells words with."""


def train_wordpiece(texts: Sequence[str], size: int) -> Tokenizer:
    """Returns an uncased BERT tokenizer with a vocabulary of at most `size` pieces of these texts.

    The same texts give the same vocabulary. Left alone the library numbers the pieces of one
    character in the order of a hash table, and breaks ties between pairs by these numbers; so
    all of them are given to it first, in a fixed order.
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
    """Returns the most frequent characters of the texts as the tokenizer sees them, in order."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(tokenizer.normalizer.normalize_str(text))
    characters = (character for character in counts if not character.isspace())
    return sorted(sorted(characters, key=lambda one: (-counts[one], one))[:_ALPHABET])


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Rows that a model needs: one more than the largest id, as numbers may be left out."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def load(folder: Path) -> Tokenizer:
    """Returns the fast tokenizer of a model folder: `tokenizer.json`, or built from `vocab.txt`.

    Raises:
        BadSpecError: the folder has neither, an unreadable one, or one that frames no text.
    """
    file, vocabulary = folder / FILE, folder / "vocab.txt"
    try:
        if file.is_file():
            tokenizer = Tokenizer.from_file(str(file))
            if not tokenizer.num_special_tokens_to_add(is_pair=False):
                raise BadSpecError(
                    "no post_processor adds [CLS] before a text and [SEP] after it; add BERT's, or give "
                    "vocab.txt instead"
                )
            return tokenizer
        if vocabulary.is_file():
            settings = folder / "tokenizer_config.json"
            config = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
            pieces = vocabulary.read_text(encoding="utf-8").rstrip("\n").split("\n")
            model = models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]")
            return _framed(_bert(model, lowercase=bool(config.get("do_lower_case", True))))
    except Exception as error:  # the library raises plain Exception
        raise BadSpecError(f"{folder}: unusable tokenizer ({error})") from None
    raise BadSpecError(f"{folder}: no tokenizer; expected tokenizer.json or vocab.txt")


def file_in(folder: Path) -> Path:
    """Returns the file that a model folder's tokenizer comes from."""
    file = folder / FILE
    return file if file.is_file() else folder / "vocab.txt"


def write(folder: Path, file: Path) -> None:
    """Writes a tokenizer as `tokenizer.json`, which says all of it, whatever file it comes from.

    Args:
        folder: Folder to write into.
        file: Tokenizer file of a model folder, from `file_in`.

    Raises:
        BadSpecError: it cannot be read.
    """
    if file.name == FILE:
        (folder / FILE).write_bytes(file.read_bytes())
    else:
        load(file.parent).save(str(folder / FILE))


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """Returns the id of a special token.

    Raises:
        BadSpecError: the vocabulary does not have it.
    """
    number: int | None = tokenizer.token_to_id(token)
    if number is None:
        raise BadSpecError(f"the vocabulary has no {token}; use the tokenizer of a BERT")
    return number


def _bert(model: models.WordPiece, *, lowercase: bool) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _framed(tokenizer: Tokenizer) -> Tokenizer:
    """Puts `[CLS]` before and `[SEP]` after each text."""
    separator, begin = (special_id(tokenizer, token) for token in ("[SEP]", "[CLS]"))
    tokenizer.add_special_tokens([token for token in SPECIAL if tokenizer.token_to_id(token) is not None])
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", separator), ("[CLS]", begin))
    return tokenizer

"""A tiny model of every family with a tokenizer of its kind, written by transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from trainers.data import tokenizers
from trainers.model_kinds.families import FAMILIES
from trainers.model_kinds.heads import Head, NumberHead
from trainers.registry import imported

TEXTS = (
    "a good film with a happy end",
    "a bad film, and a long one",
    "the worst of all films is not this one",
    "Happy people like good films; bad ones too.",
)
NAMES = {"pad": "<pad>", "unk": "<unk>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"}
BERT_NAMES = {role: f"[{role.upper()}]" for role in NAMES}
TYPES = "token_type_ids"
INPUTS = ["input_ids", TYPES, "attention_mask"]
SIZES: Mapping[str, Mapping[str, Any]] = {
    "distilbert": {"n_layers": 2, "dim": 32, "n_heads": 2, "hidden_dim": 64, "max_position_embeddings": 64},
    "roberta": {"max_position_embeddings": 66, "type_vocab_size": 1},
    "xlm-roberta": {"max_position_embeddings": 66, "type_vocab_size": 1},
    "electra": {"embedding_size": 16},
    "modernbert": {"local_attention": 8, "global_attn_every_n_layers": 2, "classifier_pooling": "mean"},
    "deberta-v2": {
        "type_vocab_size": 0,
        "relative_attention": True,
        "position_buckets": 16,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "pooler_hidden_size": 32,
    },
}
USUAL = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}


def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of the kind that the family's published models have."""
    made, names = _tokenizers()[family]()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        model_max_length=64,
        model_input_names=INPUTS
        if FAMILIES[family].token_types
        else [name for name in INPUTS if name != TYPES],
        **{f"{role}_token": name for role, name in names.items()},
    )


def write_model(folder: Path, family: str, head: Head, **fields: Any) -> PreTrainedModel:
    """Writes a model with its tokenizer, as its library does; returns the model in evaluation mode.

    Args:
        folder: Folder to write.
        family: name of the family.
        head: Head of the model.
        fields: Fields of its configuration that differ.
    """
    # Each is made once in a process, but for those with fields of a test, which may not be hashable.
    make = _made.__wrapped__ if fields else _made
    made = make(family, head.suffix, one_label=isinstance(head, NumberHead), **fields)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in made.files.items():
        (folder / name).write_bytes(content)
    torch.set_rng_state(made.random_state)
    return deepcopy(made.model)


@dataclass(frozen=True)
class _Made:
    """A model, what its library writes of it, and the state of torch's random numbers after it was made."""

    model: PreTrainedModel
    files: Mapping[str, bytes]
    random_state: torch.Tensor


@cache
def _made(family: str, suffix: str, *, one_label: bool, **fields: Any) -> _Made:
    info, tokenizer = FAMILIES[family], tokenizer_of(family)
    own = SIZES.get(family, {})
    labels = {"num_labels": 1} if one_label else {}
    sizes = {**labels, **(own if "dim" in own else {**USUAL, **own}), **fields}
    config = imported(info.config)(
        **{
            "vocab_size": len(tokenizer),
            "pad_token_id": tokenizer.pad_token_id,
            "initializer_range": 0.5,
            **sizes,
        }
    )
    torch.manual_seed(0)
    model: PreTrainedModel = imported(info.models + suffix)(config).eval()
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        files = {file.name: file.read_bytes() for file in Path(folder).iterdir()}
    return _Made(model, files, torch.get_rng_state())


def _word_pieces() -> tuple[Tokenizer, dict[str, str]]:
    return tokenizers.train_wordpiece(TEXTS * 2, 120), BERT_NAMES


def _byte_level(special: Sequence[str]) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=330, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
        ),
    )
    return made


def _roberta() -> tuple[Tokenizer, dict[str, str]]:
    made = _byte_level([NAMES[role] for role in ("cls", "pad", "sep", "unk", "mask")])
    made.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return made, NAMES


def _modernbert() -> tuple[Tokenizer, dict[str, str]]:
    made = _byte_level(list(BERT_NAMES.values()))
    return _framed(made, BERT_NAMES, "$A:0 [SEP]:0 $B:0 [SEP]:0"), BERT_NAMES


def _unigram(names: Mapping[str, str], pair: str) -> tuple[Tokenizer, dict[str, str]]:
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    special = [names[role] for role in ("cls", "pad", "sep", "unk", "mask")]
    made.train_from_iterator(
        TEXTS * 4,
        trainers.UnigramTrainer(
            vocab_size=90, special_tokens=special, unk_token=names["unk"], show_progress=False
        ),
    )
    return _framed(made, names, pair), dict(names)


def _framed(made: Tokenizer, names: Mapping[str, str], pair: str) -> Tokenizer:
    begin, end = names["cls"], names["sep"]
    made.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}",
        pair=f"{begin} {pair}",
        special_tokens=[(name, made.token_to_id(name)) for name in (begin, end)],
    )
    return made


@cache
def _tokenizers() -> Mapping[str, Callable[[], tuple[Tokenizer, dict[str, str]]]]:
    return {
        "bert": _word_pieces,
        "distilbert": _word_pieces,
        "electra": _word_pieces,
        "roberta": _roberta,
        "xlm-roberta": lambda: _unigram(NAMES, "$A </s> </s> $B </s>"),
        "modernbert": _modernbert,
        "deberta-v2": lambda: _unigram(BERT_NAMES, "$A [SEP] $B:1 [SEP]:1"),
    }

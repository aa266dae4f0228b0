"""Writes a small model of every family, with random weights and a tokenizer trained on a text file.

    python examples/write_families.py /data/ag_news/test.csv /models/families

Each folder is what transformers' own `save_pretrained` writes; examples/families.yaml trains from them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast, set_seed

VOCABULARY = 4000
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "intermediate_size": 256,
    "max_position_embeddings": 130,  # RoBERTa's positions begin after the id of padding, which is 1
}
NAMES = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}
BERT_NAMES = {role: f"[{role.upper()}]" for role in NAMES}
PAIR = "{cls} $A {sep} $B:1 {sep}:1"


def word_pieces(lines: list[str]) -> tuple[Tokenizer, Mapping[str, str]]:
    """Returns the tokenizer of BERT, DistilBERT and ELECTRA."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = list(BERT_NAMES.values())
    made.train_from_iterator(lines, trainers.WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=special))
    return framed(made, BERT_NAMES, PAIR), BERT_NAMES


def byte_pairs(lines: list[str], names: Mapping[str, str], pair: str) -> tuple[Tokenizer, Mapping[str, str]]:
    """Returns the tokenizer of RoBERTa and ModernBERT."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(names.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(lines, trainer)
    return framed(made, names, pair), names


def unigram(lines: list[str], names: Mapping[str, str], pair: str) -> tuple[Tokenizer, Mapping[str, str]]:
    """Returns the tokenizer of XLM-R and DeBERTa."""
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=VOCABULARY, special_tokens=list(names.values()), unk_token=names["unk"]
    )
    made.train_from_iterator(lines, trainer)
    return framed(made, names, pair), names


def framed(made: Tokenizer, names: Mapping[str, str], pair: str) -> Tokenizer:
    """Returns a tokenizer that puts special tokens around texts and pairs."""
    begin, end = names["cls"], names["sep"]
    made.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}",
        pair=pair.format(cls=begin, sep=end),
        special_tokens=[(name, made.token_to_id(name)) for name in (begin, end)],
    )
    return made


DOUBLED = "{cls} $A {sep} {sep} $B {sep}"
FAMILIES = {
    "bert": (word_pieces, {}),
    "distilbert": (
        word_pieces,
        {"n_layers": 2, "dim": 64, "n_heads": 2, "hidden_dim": 256, "max_position_embeddings": 130},
    ),
    "roberta": (lambda lines: byte_pairs(lines, NAMES, DOUBLED), {"type_vocab_size": 1}),
    "xlm-roberta": (lambda lines: unigram(lines, NAMES, DOUBLED), {"type_vocab_size": 1}),
    "electra": (word_pieces, {"embedding_size": 32}),
    "modernbert": (
        lambda lines: byte_pairs(lines, BERT_NAMES, "{cls} $A {sep} $B {sep}"),
        {"local_attention": 32, "global_attn_every_n_layers": 2},
    ),
    "deberta-v2": (
        lambda lines: unigram(lines, BERT_NAMES, PAIR),
        {
            "type_vocab_size": 0,
            "relative_attention": True,
            "position_buckets": 32,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
        },
    ),
}
"""The tokenizer of each family, and the fields in which its configuration differs."""


def main() -> None:
    """Writes a folder for each family."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("texts", type=Path, help="text file that the tokenizers are trained on")
    parser.add_argument("folder", type=Path, help="folder that the models are written into")
    arguments = parser.parse_args()
    lines = arguments.texts.read_text(encoding="utf-8").splitlines()
    for family, (tokenizer_of, fields) in FAMILIES.items():
        made, names = tokenizer_of(lines)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=made,
            model_max_length=128,
            **{f"{role}_token": name for role, name in names.items()},
        )
        sizes = fields if "dim" in fields else {**SIZES, **fields}
        config = AutoConfig.for_model(
            family, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **sizes
        )
        set_seed(0)
        for part in (AutoModel.from_config(config), tokenizer):
            part.save_pretrained(arguments.folder / family)


if __name__ == "__main__":
    main()

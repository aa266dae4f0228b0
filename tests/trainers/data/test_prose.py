"""Plain text from raw text: detokenisers, cleaning, sentences, packing."""

from __future__ import annotations

import time
from typing import get_args

import pytest

from trainers.data.prose import DETOKENISERS, detokenised, form_of, packed, paragraphs, sentences
from trainers.tasks.mlm import MaskFields


@pytest.mark.parametrize(
    ("form", "tokens", "written"),
    [
        (
            "penn_treebank",
            " mr. <unk> is n't chairman of <unk> n.v. the dutch publishing group 's unit ",
            "mr. <unk> isn't chairman of <unk> n.v. the dutch publishing group's unit",
        ),
        ("penn_treebank", "we ca n't and wo n't , they 'll see", "we can't and won't, they'll see"),
        ("penn_treebank", "a $ N million N-year loan at N %", "a $<unk> million <unk>-year loan at <unk>%"),
        ("penn_treebank", "`` it is , '' he said . `` no ! ''", '"it is," he said. "no!"'),
        ("penn_treebank", "the -LRB- old -RRB- yes\\/no \\* can not", "the (old) yes/no * cannot"),
        ("penn_treebank", "N. Scott and U.N. talks", "N. Scott and U.N. talks"),
        ("penn_treebank", "the companies ' plans", "the companies' plans"),
        ("wikitext", "1 @,@ 000 ( 5 @-@ 6 % ) , \" so \" it didn 't", '1,000 (5-6%), "so" it didn\'t'),
        ("none", "as it 's", "as it 's"),
    ],
)  # fmt: skip
def test_tokenised_text_is_joined_as_it_was_written(form, tokens, written):
    assert detokenised(tokens, form) == written


def test_the_task_offers_every_detokeniser():
    assert get_args(MaskFields.model_fields["detokenise"].annotation) == ("none", *DETOKENISERS)


def test_the_form_of_a_text_is_recognised():
    assert form_of(" = Tea = \n A well @-@ known cup .") == "wikitext"
    assert form_of("the <unk> was n't there") == "penn_treebank"
    assert form_of("It wasn't <unk>, as they say.") is None


WIKI = """{{Infobox tea|name={{lang|fr|Thé}}
|origin=China}}
'''Tea''' is an [[Aromatic compound|aromatic]] [[drink]].<ref name="a">Smith, {{cite}} p. 3</ref>
It&nbsp;is<ref name="a" /> old.<!-- a
-->
== History ==
{| class="wikitable"
! Year !! Cups
|-
| 1900 || 3
|}
[[File:Tea.jpg|thumb|A [[cup]] of tea]]
* See [https://example.org the page] in full.<ref>B.</ref>
__NOTOC__
1900 - 1910
[[Category:Drinks]]
"""


def test_markup_of_wikis_is_removed():
    assert paragraphs(WIKI) == ["Tea is an aromatic drink.", "It is old.", "See the page in full."]


def test_characters_are_normal_and_visible():
    assert paragraphs("Cafe\u0301\u00ad\x00 au\u200b lait\u0085Second\tline .\r\n\ud800End.") == [
        "Café au lait Second line .",
        "End.",
    ]


def test_wrapped_lines_are_one_paragraph_and_books_lose_their_frame():
    start, end = (f"*** {word} OF THE PROJECT GUTENBERG EBOOK TEA ***" for word in ("START", "END"))
    book = f"Licence.\n{start}\n\nIt was\na cup.\n\nOf tea\n\n{end}\nMore."
    assert paragraphs(book) == ["It was a cup.", "Of tea"]
    assert paragraphs("it was\na cup", wrapped=False) == ["it was", "a cup"]


@pytest.mark.parametrize(
    "expected",
    [
        ["Mr. J. R. Smith of Acme Inc. met Dr. Lee at 3.5 p.m. on Jan. 5.", "They spoke."],
        ['"Is it?" she said.', '"Yes!"', "(It was.)", "See Fig. 3 and No. 7."],
        ["In the U.S. Congress, e.g. today, it costs $3.50.", "It is I.", "Why?!", "Because…", "So."],
        ["茶。", "好！"],
    ],
)
def test_sentences_end_where_a_reader_would_end_them(expected):
    glue = "" if expected[0][0] > "一" else " "
    assert list(sentences(glue.join(expected))) == expected


def test_texts_are_whole_sentences():
    of = ["a b c.", "d e.", "f.", "g h i j k l m.", "n."]
    assert list(packed(of, 6)) == ["a b c. d e. f.", "g h i j k l m.", "n."]
    assert list(packed(of, 1)) == of


@pytest.mark.parametrize(
    "piece", ["{{", "[[", "<ref>", "<!--", "[[a|", "''", "{|\n", "*** START OF TH", "<a ", ". ", "&"]
)
def test_time_grows_with_the_length_alone(piece):
    began = time.process_time()
    for paragraph in paragraphs(piece * 100_000):
        list(sentences(paragraph))
    assert time.process_time() - began < 2.0

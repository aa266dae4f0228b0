"""Plain English from raw text: tokenised corpora joined again, markup and boilerplate removed, sentences.

Pure functions on strings. Expressions are bounded, so that time grows with the length of a text alone.
"""

import html
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping

UNKNOWN = "<unk>"  # What stands for words, and after `detokenised` for numbers, that a corpus left out

# -- Tokenised corpora -----------------------------------------------------------------------------

_BRACKETS = {"-LRB-": "(", "-RRB-": ")", "-LCB-": "{", "-RCB-": "}", "-LSB-": "[", "-RSB-": "]"}
_TO_THE_LEFT = frozenset(
    (*",.;:?!%)]}", "...", "''", "'", "n't", "'t", "'s", "'m", "'d", "'re", "'ve", "'ll", "'S", "N'T")
)
_TO_THE_RIGHT = frozenset((*"([{$#£€", "``", "`"))
_QUOTES = {"``": '"', "''": '"', "`": "'"}
_NUMBER = re.compile(r"(?<![\w.'])N(?![\w.'])")
_SPLIT_WORDS = {"can": "not", "gon": "na", "got": "ta", "wan": "na", "gim": "me", "lem": "me"}
_WIKITEXT_JOINTS = re.compile(r" @([-,.])@ ")
_WIKITEXT = re.compile(r" @[-,.]@ |^ = .* = $", re.MULTILINE)
_TREEBANK = re.compile(r" n't | 's |``|(?<!\S)N(?!\S)")


def _treebank(line: str) -> str:
    tokens = [_NUMBER.sub(UNKNOWN, _BRACKETS.get(token.upper(), token)) for token in line.split()]
    return _joined(tokens).replace("\\/", "/").replace("\\*", "*")


def _wikitext(line: str) -> str:
    return _joined(_WIKITEXT_JOINTS.sub(r"\1", line).split())


def _joined(tokens: Iterable[str]) -> str:
    pieces: list[str] = []
    glued, in_quotes, before = True, False, ""
    for token in tokens:
        closes = token == '"' and in_quotes
        if not (glued or closes or token in _TO_THE_LEFT or _SPLIT_WORDS.get(before) == token):
            pieces.append(" ")
        pieces.append(_QUOTES.get(token, token))
        if token == '"':
            in_quotes = not in_quotes
        glued = token in _TO_THE_RIGHT or (token == '"' and in_quotes)
        before = token
    return "".join(pieces)


DETOKENISERS: Mapping[str, Callable[[str], str]] = {"penn_treebank": _treebank, "wikitext": _wikitext}
"""By the name of the form. `do n't ( the '' x '' )` becomes `don't (the "x")`, and `N` an unknown number."""


def detokenised(text: str, form: str) -> str:
    """Returns a text as it was written, as far as the form shows; `form` none leaves it as it is."""
    detokenise = DETOKENISERS.get(form)
    return text if detokenise is None else "\n".join(map(detokenise, text.split("\n")))


def form_of(text: str) -> str | None:
    """Returns the detokeniser whose form a text seems to have; None = it is written plainly."""
    if _WIKITEXT.search(text):
        return "wikitext"
    return "penn_treebank" if UNKNOWN in text and _TREEBANK.search(text) else None


# -- Cleaning --------------------------------------------------------------------------------------

_BREAKS = re.compile("\r\n|[\r\x0b\x0c\x85\u2028\u2029]")
_INVISIBLE = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\u00ad\u200b\u200e\u200f\u2060\ufeff\ufffd]")
_GUTENBERG = re.compile(r"^\*\*\* ?(START|END) OF TH.{0,200}?\*\*\*", re.MULTILINE | re.IGNORECASE)
_TEMPLATE = re.compile(r"\{\{[^{}]*\}\}")
_LINK = re.compile(r"\[\[([^\[\]]*)\]\]")
_NOT_TEXT = re.compile(r"\s*:?(file|image|category|media):", re.IGNORECASE)
_WEB_LINK = re.compile(r"\[(?:https?:)?//[^\s\]]+ ?([^\]]*)\]")
_HIDDEN = re.compile(
    r"<!--(?:[^<-]++|<(?!!--)|-(?!->))*+-->"
    r"|<(ref|math|gallery|nowiki)\b[^<>]{0,500}?(?:/>|>(?:[^<]++|<(?!/?\1\b))*+</\1>)",
    re.IGNORECASE,
)
_TAG = re.compile(rf"</?(?!{UNKNOWN[1:]})[a-z][^<>]{{0,500}}>", re.IGNORECASE)
_EMPHASIS = re.compile("'{2,5}")
_NESTED = 8  # Templates and links inside each other
_DROPPED = re.compile(r"=.*=$|\{\||\||!|__[A-Z]+__$|</?doc\b")
_BULLET = re.compile(r"[*#:;]+\s*")
_ENDS_SENTENCE = tuple(".!?…:;。！？\"'”’»)")


def paragraphs(text: str, *, wrapped: bool = True) -> list[str]:
    """Returns a document's paragraphs as plain text: NFC, one space between words, without markup.

    Headings, tables, templates, references, tags, lines without a letter and what frames books of Project
    Gutenberg are removed. With `wrapped` a line that ends no sentence is continued by the next one.
    """
    text = _INVISIBLE.sub("", _BREAKS.sub("\n", unicodedata.normalize("NFC", text)))
    text = text.encode("utf-8", "ignore").decode("utf-8")  # without halves of surrogate pairs
    done: list[str] = []
    block: list[str] = []
    for raw in _without_markup(_inside_gutenberg(text)).split("\n"):
        line = " ".join(raw.split())
        kept = bool(line) and not _is_dropped(line)
        if kept:
            block.append(_BULLET.sub("", line, count=1) if line[0] in "*#:;" else line)
        if block and (not kept or not wrapped or line.endswith(_ENDS_SENTENCE)):
            done.append(" ".join(block))
            block = []
    return [*done, " ".join(block)] if block else done


def _is_dropped(line: str) -> bool:
    if line[0] in "={|!<_" and _DROPPED.match(line):
        return True
    return not any(map(str.isalpha, line))


def _inside_gutenberg(text: str) -> str:
    begin, end = 0, len(text)
    for mark in _GUTENBERG.finditer(text):
        if mark[1].upper() == "START":
            begin = mark.end()
        else:
            end = mark.start()
            break
    return text[begin:end] if begin < end else text


def _without_markup(text: str) -> str:
    if "<" in text:
        text = _HIDDEN.sub("", text)
    for _ in range(_NESTED if "{{" in text else 0):
        text, count = _TEMPLATE.subn("", text)
        if not count:
            break
    for _ in range(_NESTED if "[[" in text else 0):
        text, count = _LINK.subn(_shown, text)
        if not count:
            break
    if "//" in text:
        text = _WEB_LINK.sub(r"\1", text)
    if "<" in text:
        text = _TAG.sub("", text)
    if "''" in text:
        text = _EMPHASIS.sub("", text)
    return html.unescape(text) if "&" in text else text


def _shown(link: re.Match[str]) -> str:
    return "" if _NOT_TEXT.match(link[1]) else link[1].rpartition("|")[2]


# -- Sentences -------------------------------------------------------------------------------------

_END = re.compile(r"[.!?…]+[\"'”’»)\]]*\s+|[。！？]+[”’」』）]*")
_OPENING = "\"'“‘«([¿¡"
_ABBREVIATIONS = frozenset(
    (
        "approx", "apr", "aug", "ave", "blvd", "bros", "ca", "capt", "cf", "co", "col",
        "corp", "dec", "dept", "dr", "ed", "eds", "est", "etc", "feb", "fr", "gen", "gov", "hon", "inc",
        "jan", "jr", "lt", "ltd", "maj", "mr", "mrs", "ms", "mt", "nov", "oct", "op", "pres", "prof", "rep",
        "rev", "sen", "sept", "sgt", "sr", "st", "ste", "supt", "vs",
    )
)  # fmt: skip
_BEFORE_NUMBERS = frozenset(("art", "ch", "eq", "fig", "figs", "no", "nos", "p", "pp", "sec", "vol"))
_DOTTED = re.compile(r"(?:[^\W\d]\.)+[^\W\d]")  # such as U.S or p.m


def sentences(paragraph: str) -> Iterator[str]:
    """Yields a paragraph's sentences, by punctuation, the next letter and a list of abbreviations."""
    begin = 0
    for end in _END.finditer(paragraph):
        if _is_end(paragraph, begin, end):
            yield paragraph[begin : end.end()].rstrip()
            begin = end.end()
    if begin < len(paragraph):
        yield paragraph[begin:]


def _is_end(paragraph: str, begin: int, end: re.Match[str]) -> bool:
    follows = paragraph[end.end() : end.end() + 3].lstrip(_OPENING)[:1]
    if follows.islower():
        return False
    if end[0].rstrip() != ".":
        return True
    word = paragraph[begin : end.start()].rpartition(" ")[2].lstrip(_OPENING)
    if len(word) == 1 and word.isupper() and word != "I":  # an initial
        return False
    if word.lower() in _BEFORE_NUMBERS and follows.isdigit():
        return False
    return not _DOTTED.fullmatch(word) and word.lower() not in _ABBREVIATIONS


def packed(sentences: Iterable[str], words: int) -> Iterator[str]:
    """Yields texts of whole sentences with at most so many words, longer sentences alone."""
    text: list[str] = []
    count = 0
    for sentence in sentences:
        length = sentence.count(" ") + 1
        if text and count + length > words:
            yield " ".join(text)
            text, count = [], 0
        text.append(sentence)
        count += length
    if text:
        yield " ".join(text)

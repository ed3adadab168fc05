"""Suggestions for a mistyped name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

MOST = 3
"""Maximum number of suggestions."""
CLOSE = 0.6
"""Minimum score of a suggestion."""
_BEHIND = 0.2
"""Maximum distance of a suggestion from the best score."""
_LONGEST = 200
"""Maximum number of characters to compare; typed names are shorter."""
_PREFIX, _TYPO = 0.85, 0.7
"""Score of a word that is the beginning of another (`grad` of `gradient`), and of a similar word."""
_ALIKE = 0.75
"""Minimum ratio for two words to be similar."""
_UNASKED = 0.04
"""Penalty per word of a candidate that was not typed: `loss` means `train/loss`, not `train/loss_ema`."""


def did_you_mean(name: str, candidates: Iterable[str] | Mapping[str, str]) -> str:
    """`did you mean 'train/loss' or 'eval/loss'?`; empty if nothing is close."""
    close = closest(name, candidates)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else ""


def closest(name: str, candidates: Iterable[str] | Mapping[str, str], most: int = MOST) -> list[str]:
    """The candidates closest to a name, best first; ties keep their order.

    A mapping gives the common name of each candidate: `gradient/global_norm` is the "gradient norm".
    """
    called = candidates if isinstance(candidates, Mapping) else dict.fromkeys(candidates, "")
    scores = {candidate: max(_scores(name[:_LONGEST], candidate, words)) for candidate, words in called.items()}
    least = max(CLOSE, max(scores.values(), default=0.0) - _BEHIND)
    close = [candidate for candidate, score in scores.items() if score >= least]
    return sorted(close, key=lambda candidate: -scores[candidate])[:most]


def words_in(text: str) -> list[str]:
    """The words of a text in lower case: `gradient/global_norm` has three, so does `valLoss 2`, and `NaN` is one."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z]\w\w)", " ", text)
    return re.findall(r"[^\W_]+", apart.casefold())


def likeness(word: str, other: str) -> float:
    """1 for the same word, less for a prefix or a similar word, else 0."""
    if word == other:
        return 1.0
    if min(len(word), len(other)) >= 2 and (other.startswith(word) or word.startswith(other)):
        return _PREFIX
    return _TYPO * _alike(word, other, _ALIKE)


@lru_cache(1 << 14)
def _alike(text: str, other: str, least: float) -> float:
    """Similarity of two texts, from 0 to 1; 0 if it is less than `least`."""
    matcher = difflib.SequenceMatcher(None, other, text)
    is_close = matcher.real_quick_ratio() >= least and matcher.quick_ratio() >= least and matcher.ratio() >= least
    return matcher.ratio() if is_close else 0.0


def _scores(name: str, candidate: str, words: str) -> Iterable[float]:
    typed, own, called = words_in(name), words_in(candidate[:_LONGEST]), words_in(words)
    for spelling in (own, called, own + called):
        yield _alike("".join(typed), "".join(spelling), CLOSE)
        yield _covered(typed, spelling) if typed else 0.0


def _covered(typed: Sequence[str], words: Sequence[str]) -> float:
    """The fraction of typed words found in `words`, minus a penalty for each word that was not typed."""
    initials = "".join(word[0] for word in typed)
    if len(typed) > 1 and initials in words:  # `learning rate` means `lr`
        return 1.0 - _UNASKED * (len(words) - 1)
    best = [max(((likeness(word, other), other) for other in words), default=(0.0, "")) for word in typed]
    unasked = len(set(words) - {other for score, other in best if score})
    return sum(score for score, _ in best) / len(typed) - _UNASKED * unasked

"""What a person may have meant by a name that does not exist."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

MOST = 3
"""Suggestions in one sentence."""
CLOSE = 0.6
"""Score from which on a name is worth suggesting."""
_BEHIND = 0.2
"""How far a suggestion may be behind the best one."""
_LONGEST = 200
"""Characters that are compared; whoever mistypes a name types less."""
_PREFIX, _TYPO = 0.85, 0.7
"""What a word counts that begins another (`grad` of `gradient`), and one that looks alike."""
_ALIKE = 0.75
"""Ratio from which on two words look alike."""
_UNASKED = 0.04
"""What each word of a candidate costs that was not typed: of `train/loss` and `train/loss_ema` the first is meant."""


def did_you_mean(name: str, candidates: Iterable[str] | Mapping[str, str]) -> str:
    """`did you mean 'train/loss' or 'eval/loss'?`; empty if nothing is close."""
    close = closest(name, candidates)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else ""


def closest(name: str, candidates: Iterable[str] | Mapping[str, str], most: int = MOST) -> list[str]:
    """The candidates that a name may stand for, best first; of equals the one that comes first.

    A mapping tells, for each candidate, what people call it: `gradient/global_norm` is the "gradient norm".
    """
    called = candidates if isinstance(candidates, Mapping) else dict.fromkeys(candidates, "")
    scores = {candidate: max(_scores(name[:_LONGEST], candidate, words)) for candidate, words in called.items()}
    least = max(CLOSE, max(scores.values(), default=0.0) - _BEHIND)
    close = [candidate for candidate, score in scores.items() if score >= least]
    return sorted(close, key=lambda candidate: -scores[candidate])[:most]


def words_in(text: str) -> list[str]:
    """Its words in lower case: `gradient/global_norm` has three, and so has `valLoss 2`."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text)
    return re.findall(r"[^\W_]+", apart.casefold())


def likeness(word: str, other: str) -> float:
    """1 for the same word, less for the beginning of one and for one that looks alike, else 0."""
    if word == other:
        return 1.0
    if min(len(word), len(other)) >= 2 and (other.startswith(word) or word.startswith(other)):
        return _PREFIX
    return _TYPO * _alike(word, other, _ALIKE)


@lru_cache(1 << 14)
def _alike(text: str, other: str, least: float) -> float:
    """How much of two texts is the same, 0 to 1; 0 if it is less than `least`."""
    matcher = difflib.SequenceMatcher(None, other, text)
    is_close = matcher.real_quick_ratio() >= least and matcher.quick_ratio() >= least and matcher.ratio() >= least
    return matcher.ratio() if is_close else 0.0


def _scores(name: str, candidate: str, words: str) -> Iterable[float]:
    typed, own, called = words_in(name), words_in(candidate[:_LONGEST]), words_in(words)
    for spelling in (own, called, own + called):
        yield _alike("".join(typed), "".join(spelling), CLOSE)
        yield _covered(typed, spelling) if typed else 0.0


def _covered(typed: Sequence[str], words: Sequence[str]) -> float:
    """The part of the typed words that is among these, less a little for each that nobody typed."""
    initials = "".join(word[0] for word in typed)
    if len(typed) > 1 and initials in words:  # learning_rate is lr
        return 1.0 - _UNASKED * (len(words) - 1)
    best = [max(((likeness(word, other), other) for other in words), default=(0.0, "")) for word in typed]
    unasked = len(set(words) - {other for score, other in best if score})
    return sum(score for score, _ in best) / len(typed) - _UNASKED * unasked

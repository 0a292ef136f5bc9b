"""Which rows of a table are shown: small named selectors, composed, and exact over ranks.

Every selector keeps only candidates. Merging two ranks offers one's candidates to the other, so that the result equals
a selection over the pooled rows: they are re-selected, never concatenated. Rows equal in every column are one row.
"""

import difflib
import hashlib
import heapq
from collections.abc import Callable
from typing import Any

from torchtitan_rl.observability.rows import MISSING, Row, score_of

Place = tuple[Any, ...]
"""What breaks ties: prompt_idx, sample_idx, split; rows without them come later, by their content."""


class Entry:
    """A row with what selectors ask of it. Entries compare by content, as the last tie-break of all."""

    __slots__ = ("row", "score", "lacks_score", "place", "_digest")

    def __init__(self, row: Row) -> None:
        self.row = row
        score = score_of(row)
        self.lacks_score = score is MISSING
        self.score: float | None = None if self.lacks_score else score
        self._digest: str | None = None
        prompt_idx, sample_idx = row.get("prompt_idx"), row.get("sample_idx")
        if isinstance(prompt_idx, int) and isinstance(sample_idx, int):
            self.place: Place = (0, prompt_idx, sample_idx, str(row.get("split")))
        else:
            self.place = (1, self.digest)

    @property
    def digest(self) -> str:
        """Of all the row's columns, in any order."""
        if self._digest is None:
            content = repr(sorted(self.row.items())).encode("utf-8", "backslashreplace")
            self._digest = hashlib.blake2b(content, digest_size=12).hexdigest()
        return self._digest

    @property
    def scored(self) -> bool:
        """Whether it takes part in rankings by score."""
        return self.score is not None

    @property
    def group(self) -> Place | None:
        """Its prompt's group; None for rows that are in none."""
        return (self.row["prompt_idx"], str(self.row.get("split"))) if "prompt_idx" in self.row else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Entry) and self.digest == other.digest

    def __lt__(self, other: "Entry") -> bool:
        return self.digest < other.digest

    __hash__ = None


class _Kept:
    """An entry in a heap whose root is the worst of those kept."""

    __slots__ = ("key", "entry")

    def __init__(self, key: tuple, entry: Entry) -> None:
        self.key, self.entry = key, entry

    def __lt__(self, other: "_Kept") -> bool:
        return other.key < self.key


class Best:
    """The k entries of smallest `key` that `takes` accepts, ties by place: O(log k) an entry. k = 0 keeps none."""

    def __init__(self, k: int) -> None:
        self.k = k
        self._heap: list[_Kept] = []
        self._by_place: dict[Place, list[Entry]] = {}

    def takes(self, entry: Entry) -> bool:
        """Whether this selector considers the entry at all."""
        return True

    def key(self, entry: Entry) -> Any:
        """What entries are ordered by, before their places."""
        return 0

    def add(self, entry: Entry) -> None:
        """Offers one entry."""
        if self.k <= 0 or not self.takes(entry):
            return
        key = (self.key(entry), entry.place, entry)
        full = len(self._heap) >= self.k
        if full and not key < self._heap[0].key:
            return
        if entry in self._by_place.get(entry.place, ()):
            return
        kept = _Kept(key, entry)
        if full:
            gone = heapq.heapreplace(self._heap, kept).entry
            self._by_place[gone.place].remove(gone)
            if not self._by_place[gone.place]:
                del self._by_place[gone.place]
        else:
            heapq.heappush(self._heap, kept)
        self._by_place.setdefault(entry.place, []).append(entry)

    def entries(self) -> list[Entry]:
        """The selected entries, best first."""
        return [kept.entry for kept in sorted(self._heap, key=lambda kept: kept.key)]

    def candidates(self) -> list[Entry]:
        """What another rank's selector needs of this one to select over both."""
        return self.entries()


class Top(Best):
    """Highest score."""

    def takes(self, entry: Entry) -> bool:
        return entry.scored

    def key(self, entry: Entry) -> float:
        return -entry.score


class Bottom(Top):
    """Lowest score."""

    def key(self, entry: Entry) -> float:
        return entry.score


class Unscored(Best):
    """Rows whose score is None, NaN, no number or absent: shown, never ranked."""

    def takes(self, entry: Entry) -> bool:
        return not entry.scored


class Random(Best):
    """A seeded sample: by a hash of seed, step and place, so that it is the same for any number of ranks."""

    def __init__(self, k: int, seed: int = 0) -> None:
        super().__init__(k)
        self.seed = seed

    def key(self, entry: Entry) -> bytes:
        when = entry.row["step"] if entry.row.get("step") is not None else entry.digest
        text = f"{self.seed}:{when}:{entry.place}"
        return hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=8).digest()


class Longest(Best):
    """Most response tokens; characters for rows that do not count tokens."""

    def takes(self, entry: Entry) -> bool:
        return "response" in entry.row or "response_tokens" in entry.row

    def key(self, entry: Entry) -> float:
        tokens = entry.row.get("response_tokens")
        return -(tokens if isinstance(tokens, (int, float)) else len(str(entry.row.get("response", ""))))


class Truncated(Best):
    """Stopped by the length limit."""

    def takes(self, entry: Entry) -> bool:
        return entry.row.get("finish_reason") == "length"


class Failed(Best):
    """No answer could be extracted."""

    def takes(self, entry: Entry) -> bool:
        return entry.row.get("answer", MISSING) is None


class Pinned(Best):
    """Every row, up to 64 a step, of the prompts that hold a given text."""

    def __init__(self, text: str) -> None:
        super().__init__(64)
        self.text = text

    def takes(self, entry: Entry) -> bool:
        return self.text in str(entry.row.get("prompt", ""))


class EachGroup:
    """A selector of its own for each group."""

    def __init__(self, new: Callable[[int], Best], k: int) -> None:
        self.new, self.k = new, k
        self._groups: dict[Place, Best] = {}

    def add(self, entry: Entry) -> None:
        """Offers one entry to its group's selector."""
        if entry.group is not None and self.k > 0:
            if entry.group not in self._groups:
                self._groups[entry.group] = self.new(self.k)
            self._groups[entry.group].add(entry)

    def entries(self) -> list[Entry]:
        """The selected entries of all groups."""
        return [entry for group in self._groups.values() for entry in group.entries()]

    def candidates(self) -> list[Entry]:
        """What another rank's selector needs of this one."""
        return self.entries()


class ZeroVariance:
    """The first row of each of the first k groups of two or more rows with one and the same reward."""

    def __init__(self, k: int) -> None:
        self.k = k
        self._ends: dict[Place, tuple[tuple, tuple]] = {}

    def add(self, entry: Entry) -> None:
        """Keeps each group's first and last row by reward and place: equal rewards there are equal everywhere."""
        if entry.group is None or self.k <= 0 or not entry.scored:
            return
        reward = entry.row.get("reward", entry.score)
        if not isinstance(reward, (int, float)):
            return
        member = (reward, entry.place, entry)
        first, last = self._ends.get(entry.group, (member, member))
        self._ends[entry.group] = (min(first, member), max(last, member))

    def entries(self) -> list[Entry]:
        """One row of each group without variance."""
        alike = [first for first, last in self._ends.values() if first[0] == last[0] and first[2] != last[2]]
        return [entry for _, _, entry in sorted(alike, key=lambda member: member[1])[: self.k]]

    def candidates(self) -> list[Entry]:
        """Both ends of every group."""
        return [member[2] for ends in self._ends.values() for member in ends]


Selector = Best | EachGroup | ZeroVariance

SELECTORS: dict[str, Callable[..., Selector]] = {
    "top": Top,
    "bottom": Bottom,
    "random": Random,
    "longest": Longest,
    "truncated": Truncated,
    "failed": Failed,
    "unscored": Unscored,
    "zero_variance": ZeroVariance,
    "group_best": lambda k: EachGroup(Top, k),
    "group_worst": lambda k: EachGroup(Bottom, k),
    "pinned": Pinned,
}
"""What `select` may name; each takes k, and `pinned` the text of a prompt."""

UNSCORED_SHOWN = 2
"""Rows without a usable score that are shown of each step, where the config does not name another number."""


def parse_selector(text: str, seed: int) -> tuple[str, Selector]:
    """A selector from "name:k", such as "top:2"; k is 1 where it is left out. Also "pinned:TEXT".

    Returns: its reason, as `select_reason` shows it, and the selector.
    Raises: ValueError for an unknown name or a k that is no number from 0 up.
    """
    name, _, argument = text.partition(":")
    if name not in SELECTORS:
        near = difflib.get_close_matches(name, SELECTORS, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"recorder.select: unknown selector {name!r} in {text!r}; known: {', '.join(SELECTORS)}.{hint}"
        )
    reason = name.replace("_", " ")
    if name == "pinned":
        if not argument:
            raise ValueError("recorder.select: 'pinned' needs a text of the prompt, as in 'pinned:What is 12'")
        return reason, Pinned(argument)
    if argument and not argument.isdecimal():
        raise ValueError(f"recorder.select: {text!r}: expected a number of rows from 0 up after the colon")
    k = int(argument) if argument else 1
    return reason, Random(k, seed) if name == "random" else SELECTORS[name](k)

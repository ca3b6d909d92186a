"""The names of embeddings in prompts: whole words, in letters of any case, the longest name first."""

import re
from collections import defaultdict
from collections.abc import Iterable

_ATOM = re.compile(r"\w+|[^\w\s]")


class EmbeddingNames:
    """Names to be found in prompts, each by its first word, so that a prompt takes as long for many as for few."""

    def __init__(self, names: Iterable[str]) -> None:
        self._by_word: dict[str, list[str]] = defaultdict(list)
        for name in sorted(names, key=len, reverse=True):
            if (word := _ATOM.match(name)) is not None:
                self._by_word[word[0].lower()].append(name)

    def find(self, text: str) -> list[tuple[int, int, str]]:
        """Return start, end and name of each embedding that `text` names, in order; none overlaps another."""
        found, end = [], 0
        for word in _ATOM.finditer(text) if self._by_word else ():
            start = word.start()
            for name in self._by_word.get(word[0].lower(), ()) if start >= end else ():
                stop = start + len(name)
                goes_on = name[-1].isalnum() and (text[stop : stop + 1].isalnum() or text[stop : stop + 1] == "_")
                if text[start:stop].lower() == name.lower() and not goes_on:
                    found.append((start, stop, name))
                    end = stop
                    break
        return found

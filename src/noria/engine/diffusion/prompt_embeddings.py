"""The text encoder's outputs: a cache for the most recently used prompts, and the rows of the last model call."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from noria.models.diffusion.conditioning import Conditioning, ConditioningRows, collate
from noria.models.diffusion.prompts.clip_prompt import PromptText


class AdaptedPrompt(NamedTuple):
    """A prompt whose text encoders have LoRA adapters."""

    prompt: PromptText
    loras: tuple[tuple[str, float], ...]  # digests and weights


Prompt = PromptText | AdaptedPrompt
PromptT = TypeVar("PromptT", bound=Prompt)


class PromptEmbeddingCache(Generic[PromptT]):
    """An LRU cache of conditioning by prompt, of at most `max_bytes`; missing prompts are encoded together.

    With `padded_batch`, prompts are encoded in batches of exactly that size, because a kernel's result may differ in
    the last bit with its batch size.
    """

    def __init__(
        self,
        text_encode: Callable[[Sequence[PromptT]], list[Conditioning]],
        max_bytes: int,
        padded_batch: int | None,
    ) -> None:
        self._text_encode, self._max_bytes, self._padded_batch = text_encode, max_bytes, padded_batch
        self._entries: OrderedDict[PromptT, Conditioning] = OrderedDict()
        self._num_bytes = self.max_entry_bytes = 0  # bytes of all entries; those of the largest one so far

    def get(self, prompts: Iterable[PromptT]) -> dict[PromptT, Conditioning]:
        """Return the conditioning of each distinct prompt."""
        wanted = dict.fromkeys(prompts)
        missing = [prompt for prompt in wanted if prompt not in self._entries]
        found = {prompt: self._entries[prompt] for prompt in wanted if prompt in self._entries}
        size = self._padded_batch or max(1, len(missing))
        for start in range(0, len(missing), size):
            chunk = missing[start : start + size]
            padding = chunk[:1] * (size - len(chunk)) if self._padded_batch else []
            encoded = self._text_encode(chunk + padding)
            # A view would keep the whole batch in memory as long as one of its prompts is cached.
            found |= {prompt: row.clone() for prompt, row in zip(chunk, encoded, strict=False)}
        self._num_bytes += sum(found[prompt].nbytes for prompt in missing)
        self.max_entry_bytes = max([self.max_entry_bytes, *[found[prompt].nbytes for prompt in missing]])
        for prompt in wanted:
            self._entries[prompt] = found[prompt]
            self._entries.move_to_end(prompt)
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._entries.popitem(last=False)[1].nbytes
        return found


class CollatedRows:
    """The rows of the last model call, which are kept while the batch has the same prompts in the same order."""

    def __init__(self) -> None:
        self._rows: list[Conditioning] = []
        self._collated: ConditioningRows | None = None

    def get(self, rows: list[Conditioning]) -> ConditioningRows:
        """Return `rows` as one batch."""
        is_same = len(rows) == len(self._rows) and all(a is b for a, b in zip(rows, self._rows, strict=True))
        if self._collated is None or not is_same:
            self._rows, self._collated = [], None  # freed before the next ones need memory
            self._collated, self._rows = collate(rows), rows
        return self._collated

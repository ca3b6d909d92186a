"""A cache of the text encoder's outputs for the most recently used prompts."""

from collections import OrderedDict
from collections.abc import Callable, Iterable

from noria.models.diffusion.diffusion_model import Conditioning


class PromptEmbeddingCache:
    """An LRU cache by prompt of its row of the conditioning; missing prompts are encoded together.

    With `padded_batch`, prompts are encoded in batches of exactly that size, because a kernel's result may differ in
    the last bit with its batch size.
    """

    def __init__(
        self, text_encode: Callable[[list[str]], Conditioning], capacity: int, padded_batch: int | None
    ) -> None:
        self._text_encode, self._capacity, self._padded_batch = text_encode, capacity, padded_batch
        self._entries: OrderedDict[str, Conditioning] = OrderedDict()

    def get(self, prompts: Iterable[str]) -> dict[str, Conditioning]:
        """For each distinct prompt its row of every tensor, without the dimension of rows."""
        wanted = dict.fromkeys(prompts)
        missing = [prompt for prompt in wanted if prompt not in self._entries]
        found = {prompt: self._entries[prompt] for prompt in wanted if prompt in self._entries}
        size = self._padded_batch or max(1, len(missing))
        for start in range(0, len(missing), size):
            chunk = missing[start : start + size]
            padding = [""] * (size - len(chunk)) if self._padded_batch else []
            encoded = self._text_encode(chunk + padding)
            # A view would keep the whole batch in memory as long as one of its prompts is cached.
            found |= {
                prompt: {name: rows[row].clone() for name, rows in encoded.items()} for row, prompt in enumerate(chunk)
            }
        for prompt in wanted:
            self._entries[prompt] = found[prompt]
            self._entries.move_to_end(prompt)
        while len(self._entries) > self._capacity:
            self._entries.popitem(last=False)
        return found

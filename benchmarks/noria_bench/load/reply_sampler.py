"""A few of a run's replies, kept as files while it lasts, to be looked at when nothing is measured any more. Light: clients import it."""

import pathlib

_MAX_REPLIES = 12


class ReplySampler:
    """Keeps each reply whose number is a multiple of a stride that grows with their number, so that 4 to 12 are left, evenly.

    The stride triples: were it even, the requests of 8 users that a run numbers in turn would all be those of the same few.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder, self._stride = folder, 1
        self._kept_numbers: set[int] = set()
        folder.mkdir(parents=True, exist_ok=True)

    def offer(self, number: int, content: bytes, media_type: str) -> None:
        """Keep the reply to request `number`, if it is its turn."""
        if number % self._stride:
            return
        suffix = "image" if media_type.startswith("image/") else "json"
        (self._folder / f"{number}.{suffix}").write_bytes(content)
        self._kept_numbers.add(number)
        while len(self._kept_numbers) > _MAX_REPLIES:
            self._stride *= 3
            for dropped in [number for number in self._kept_numbers if number % self._stride]:
                self._kept_numbers.remove(dropped)
                for file in self._folder.glob(f"{dropped}.*"):
                    file.unlink()


def sampled_replies(folder: pathlib.Path) -> dict[int, pathlib.Path]:
    """The files by the numbers of their requests, in order; a name ends in `.image` or, of several images, in `.json`."""
    return {int(file.stem): file for file in sorted(folder.glob("*"), key=lambda file: int(file.stem))}

"""Stores some of a run's replies as files, which are checked after the measurement.

Imports little: clients import it.
"""

import pathlib

_MAX_REPLIES = 12


class ReplySampler:
    """Stores the replies whose numbers are multiples of a stride. The stride grows, so that 4 to 12 evenly spaced ones
    remain.

    The stride triples. With an even stride, all samples would be of a few of the 8 users, whose requests are numbered
    in turn.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder, self._stride = folder, 1
        self._kept_numbers: set[int] = set()
        folder.mkdir(parents=True, exist_ok=True)

    def offer(self, number: int, content: bytes, media_type: str) -> None:
        """Store the reply to request `number` if it is a multiple of the stride."""
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
    """The files by request number, in order. One image has the suffix `.image`, several have `.json`."""
    return {int(file.stem): file for file in sorted(folder.glob("*"), key=lambda file: int(file.stem))}

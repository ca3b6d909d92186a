"""The entries of `engine.loras` and `engine.controlnets` that are folders. No torch."""

import pathlib


def split_entry(entry: str) -> tuple[str | None, pathlib.Path]:
    """Return the model and the folder of `MODEL=FOLDER`, or None and the folder of `FOLDER`, which is for all models.

    A path that begins with / or . may have a "=".
    """
    model, separator, folder = entry.partition("=")
    if separator and not entry.startswith(("/", ".")):
        return model, pathlib.Path(folder)
    return None, pathlib.Path(entry)

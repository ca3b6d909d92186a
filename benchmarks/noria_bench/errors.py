"""The errors that only the benches raise."""

from noria.errors import SetupError


class RunsError(SetupError, code="runs"):
    """A folder for `noria bench report` is missing, holds no runs, or holds a JSON file that is not a run."""

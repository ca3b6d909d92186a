"""The command line with a registry of the test's own."""

import pytest

from noria.cli.main import main


@pytest.fixture
def noria(tmp_path, capsys):
    """Runs a command on a registry of its own; returns what it prints, after checking its exit status."""

    def run(*arguments, status=0):
        assert main([*arguments, "--data-dir", str(tmp_path / "data")]) == status
        printed = capsys.readouterr()
        run.errors = printed.err
        return printed.err if status > 1 else printed.out

    return run

"""Fixtures of ../../tests/conftest.py that the benches' tests use too: folders, a tiny model, a browser."""

import importlib.util
import pathlib

_FILE = pathlib.Path(__file__).parents[2] / "tests" / "conftest.py"
_spec = importlib.util.spec_from_file_location("noria_tests_conftest", _FILE)
_conftest = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_conftest)

_own_cache, data_home, no_leaks = _conftest._own_cache, _conftest.data_home, _conftest.no_leaks
tiny_folder, chromium = _conftest.tiny_folder, _conftest.chromium

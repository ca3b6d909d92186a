"""The keeper of statistics: a real registry, reports as two front ends send them, a file that outlives it."""

import asyncio
import functools
import math
import pathlib
import shutil
from collections.abc import AsyncIterator

import pytest

from noria.errors import ConfigError
from noria.jobs.database.schema import open_jobs_database
from noria.observe.metrics.declarations import REGISTRY
from noria.registrar.registry_access import RegistryAccess
from noria.registrar.statistics_keeper import StatisticsKeeper
from noria.registry.changes import Change
from noria.registry.model_folder import read_model
from noria.registry.model_store import ModelStore
from noria.registry.schema import open_registry_database
from noria.registry.statistics.baselines import BaselineStore
from noria.registry.statistics.file import read_statistics
from noria.registry.versions import Version
from noria.statistics.distributions import CategoryCounts, Histogram
from noria.statistics.windows import CountsReport, SeriesKey

CHANGE = Change(1.0, "me")
EDGES = (1.0, 2.0)


def report(*counts: int, window: int = 10, variable: str = "steps", version: str = "shapes@1") -> CountsReport:
    return CountsReport(SeriesKey("t2i", version, variable), "scalar", window, Histogram(EDGES, list(counts)))


def gauge(name: str, variable: str = "steps") -> float | None:
    labels = {"endpoint": "t2i", "version": "shapes@1", "variable": variable}
    return REGISTRY.get_sample_value(f"noria_drift_{name}", labels)


class Fixture:
    def __init__(self, folder: pathlib.Path, version: Version, store: BaselineStore) -> None:
        self.folder, self.version, self.store = folder, version, store
        self.file, self.is_away = folder / "statistics.json", False
        open_jobs = functools.partial(open_jobs_database, "auto", folder)
        self.registry = RegistryAccess(self._open, open_jobs, "owner")
        self.keeper = self.new_keeper()

    def _open(self):
        if self.is_away:
            raise ConfigError("it is away")
        return open_registry_database("auto", self.folder)

    def new_keeper(self, window_s: float = 300.0) -> StatisticsKeeper:
        keeper = StatisticsKeeper(window_s, self.file, self.registry, lambda: 10 * window_s)
        keeper.restore()
        return keeper


@pytest.fixture
async def made(tmp_path: pathlib.Path, tiny_folder: pathlib.Path) -> AsyncIterator[Fixture]:
    engine = open_registry_database("auto", tmp_path)
    version, _ = ModelStore(engine).add("shapes", read_model(str(tiny_folder)), CHANGE)
    opened = Fixture(tmp_path, version, BaselineStore(engine))
    yield opened
    await opened.registry.close()
    engine.dispose()


async def test_reports_of_all_front_ends_are_compared_and_exported(made):
    made.keeper.add([report(100, 50, 50)])
    made.keeper.add([report(100, 50, 50), report(1, 1, 1, variable="other")])
    await made.keeper.update()
    assert gauge("psi") is None  # it has no reference
    made.store.set("t2i", made.version, {"steps": Histogram(EDGES, [50, 50, 300])}, CHANGE)
    await made.keeper.update()
    assert gauge("psi") > 0.5
    assert gauge("ks") == pytest.approx(0.5)
    assert 0 < gauge("js") < 1
    assert 0 <= gauge("p_value") < 0.01
    snapshot = read_statistics(made.file)
    assert {each.key.variable: each.windows[10].counts for each in snapshot.series} == {
        "steps": [200, 100, 100],
        "other": [1, 1, 1],
    }
    made.store.set("t2i", made.version, {"steps": None}, CHANGE)
    await made.keeper.update()
    assert math.isnan(gauge("psi"))


async def test_categories_that_the_reference_does_not_have_are_a_share(made):
    key = SeriesKey("t2i", "shapes@1", "scheduler")
    made.keeper.add([CountsReport(key, "category", 10, CategoryCounts(counts={"ddim": 15, "new": 5}))])
    made.store.set("t2i", made.version, {"scheduler": CategoryCounts(counts={"ddim": 400})}, CHANGE)
    await made.keeper.update()
    assert gauge("unseen_ratio", "scheduler") == 0.25
    assert math.isnan(gauge("psi", "scheduler"))  # the PSI of 20 values


async def test_a_registrar_that_starts_again_goes_on_with_the_file_also_without_its_registry(made):
    made.store.set("t2i", made.version, {"steps": Histogram(EDGES, [50, 50, 300])}, CHANGE)
    made.keeper.add([report(100, 50, 50)])
    await made.keeper.update()
    again = made.new_keeper()
    again.add([report(100, 50, 50)])
    made.is_away = True
    await again.update()
    (series,) = read_statistics(made.file).series
    assert series.windows[10].counts == [200, 100, 100]
    other = made.new_keeper(60.0)  # windows of another length begin anew
    other.add([report(1, 1, 1)])
    await other.update()
    assert [each.windows[10].total for each in read_statistics(made.file).series] == [3]


async def test_a_damaged_file_and_a_folder_that_cannot_be_written_are_logged_and_counting_goes_on(made, caplog):
    made.file.write_text('{"window_s": 300, "now": 1, "series": [{"key"')
    keeper = made.new_keeper()
    assert "Delete the file" in caplog.text
    keeper.add([report(1, 1, 1)])
    await keeper.update()
    assert len(read_statistics(made.file).series) == 1
    made.file.unlink()
    made.file.mkdir()
    await keeper.update()
    await keeper.update()
    assert caplog.text.count("Is a directory") == 1
    shutil.rmtree(made.file)
    await keeper.update()
    assert len(read_statistics(made.file).series) == 1


async def test_nothing_is_written_while_nothing_was_counted_and_the_rest_at_the_end(made):
    await made.keeper.update()
    assert not made.file.exists()
    task = asyncio.create_task(made.keeper.run())
    await asyncio.sleep(0)
    made.keeper.add([report(1, 1, 1)])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(read_statistics(made.file).series) == 1

"""The deployer: real registry, real connections, fake engines; front ends are the reports that they would send."""

import asyncio
import contextlib
import functools
import json
import os
import pathlib
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec
import pytest
import sqlalchemy as sa

from noria.canary.judge import Arm, JudgeSettings
from noria.canary.ramp import RampPlan
from noria.canary.shadow import ShadowCounts, ShadowPlan, ShadowReport
from noria.canary.windows import WINDOW_S, FrontendReport, InFlight, WindowReport
from noria.errors import ConfigError
from noria.jobs.database.schema import open_jobs_database
from noria.jobs.database.store import JobStore
from noria.jobs.records import NewJob, new_job_id
from noria.models.catalog import open_model
from noria.protocol.model_spec import ModelSpec
from noria.protocol.routes import Routes
from noria.registrar.deployer import Deployer
from noria.registrar.mount_client import MountClient
from noria.registrar.registry_access import RegistryAccess
from noria.registry.changes import Change
from noria.registry.deployments.routes_file import read_routes, write_routes
from noria.registry.deployments.store import DeploymentStore
from noria.registry.model_folder import read_model
from noria.registry.model_store import ModelStore
from noria.registry.schema import open_registry_database
from noria.testing.fake_engine import FakeEngine
from tiny_models import copy_with_other_weights
from waiting import wait_until_async

ENDPOINT = "tiny"
CHECKPOINTS = ("checkpoint",)
CANARY = RampPlan((10.0,))


class Server:
    """A registrar's deployer, its registry, engines, and a front end that follows at once."""

    def __init__(self, tmp_path: pathlib.Path, specs: list[ModelSpec]) -> None:
        self.file, self.now = tmp_path / "routes.json", time.time()
        self.engine = open_registry_database("auto", tmp_path)
        self.store = DeploymentStore(self.engine)
        self.configured, self.specs = specs[0], specs
        self.is_away = False
        self.in_flight: tuple[InFlight, ...] = ()
        self.windows: list[WindowReport] = []
        self.shadows: list[ShadowReport] = []

    def change(self, why: str = "") -> Change:
        return Change(self.now, "tester", why)

    def open_registry(self) -> sa.Engine:
        if self.is_away:
            raise ConfigError("it is away")
        return open_registry_database("auto", self.file.parent)

    async def start(self, engines: list[FakeEngine]) -> None:
        self.engines = [
            MountClient(f"engine-{i}", each.address, "diffusion", others=CHECKPOINTS) for i, each in enumerate(engines)
        ]
        self.tasks = [asyncio.create_task(engine.run()) for engine in self.engines]
        await wait_until_async(lambda: all(engine.is_ready for engine in self.engines))
        self.start_registrar("first")

    def start_registrar(self, owner: str) -> None:
        """Start it, as after a crash: with nothing but the registry, the file and the engines."""
        jobs = functools.partial(open_jobs_database, "auto", self.file.parent)
        self.registry = RegistryAccess(self.open_registry, jobs, owner, lambda: self.now)
        routes = read_routes(self.file)
        clock = lambda: self.now  # noqa: E731
        publish = functools.partial(write_routes, self.file)
        self.deployer = Deployer(
            [self.configured], self.engines, self.registry, publish, routes, clock, clock, checkpoints=CHECKPOINTS
        )

    async def stop(self) -> None:
        await self.deployer.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.registry.close()
        self.engine.dispose()

    async def lose_registry(self) -> None:
        """Let the registry's file be one that cannot be opened any more."""
        self.is_away = True
        await self.registry._call(self.registry._dispose)
        self.registry._engine = None

    def tick(self) -> bool:
        self.now += 1.0
        return True

    async def poll(self, *, reports: bool = True) -> None:
        report = FrontendReport(
            "frontend-0",
            self.routes().generation,
            self.in_flight,
            tuple(self.windows),
            int(self.now / WINDOW_S),
            tuple(self.shadows),
        )
        self.windows.clear()
        self.shadows.clear()
        if reports:
            self.deployer.add_report(report)
        await self.deployer.poll()

    async def poll_until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(120):
            while not condition():
                await self.poll()
                await asyncio.sleep(0.02)

    def routes(self) -> Routes:
        return read_routes(self.file)

    def routes_to_canary(self) -> bool:
        """Return whether front ends know of a canary: before, they report nothing of it."""
        return any(route.canary is not None for route in self.routes().routes)

    def state(self, number: int) -> str:
        return self.store.find(number).state

    def held(self, engine: int = 0) -> set[str]:
        return {spec.fingerprint for spec in self.engines[engine].models}


@pytest.fixture(scope="module")
def folders(tiny_folder: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> list[pathlib.Path]:
    """Two versions of a small model."""
    return [tiny_folder, copy_with_other_weights(tiny_folder, tmp_path_factory.mktemp("versions") / "second")]


@pytest.fixture(scope="module")
def registered(folders: list[pathlib.Path], tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The file of a registry that has both, of which each test gets a copy."""
    home = tmp_path_factory.mktemp("registered")
    engine = open_registry_database("auto", home)
    for folder in folders:
        ModelStore(engine).add("shapes", read_model(str(folder)), Change(time.time(), "tester"))
    engine.dispose()
    return home / "registry.sqlite"


@pytest.fixture(scope="module")
def specs(folders: list[pathlib.Path]) -> list[ModelSpec]:
    return [msgspec.structs.replace(open_model(str(folder)), name=ENDPOINT) for folder in folders]


@pytest.fixture(scope="module")
def wide(tiny_folder: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A version whose images are of another size."""
    folder = tmp_path_factory.mktemp("versions") / "wide"
    shutil.copytree(tiny_folder, folder)
    file = folder / "unet" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"sample_size": 2 * config["sample_size"]}))
    return folder


@pytest.fixture
def engines(request: pytest.FixtureRequest, specs: list[ModelSpec]) -> Iterator[list[FakeEngine]]:
    """Engines with the first version: one, unless a test asks for more."""
    with tempfile.TemporaryDirectory(prefix="noria-") as sockets, contextlib.ExitStack() as stack:  # a short path
        yield [
            stack.enter_context(FakeEngine(f"ipc://{sockets}/{number}", models=(specs[0],)))
            for number in range(getattr(request, "param", 1))
        ]


TWO_ENGINES = pytest.mark.parametrize("engines", [2], indirect=True, ids=["two engines"])


@pytest.fixture
async def server(
    tmp_path: pathlib.Path, registered: pathlib.Path, specs: list[ModelSpec], engines: list[FakeEngine]
) -> AsyncIterator[Server]:
    shutil.copy(registered, tmp_path)
    started = Server(tmp_path, specs)
    await started.start(engines)
    yield started
    await started.stop()


def deploy(
    server: Server,
    version: str = "shapes@2",
    plan: RampPlan | None = None,
    shadow: ShadowPlan | None = None,
    swap: bool = False,
    **settings: object,
) -> int:
    judge, change = JudgeSettings(**settings), server.change()
    return server.store.deploy(ENDPOINT, version, plan, judge, change, shadow=shadow, swap=swap)[0].id


@TWO_ENGINES
async def test_a_version_is_routed_once_all_engines_hold_it_and_the_old_one_released(server, engines):
    old, new = (spec.fingerprint for spec in server.specs)
    engines[1].withholds_mounts = True
    number = deploy(server)
    await server.poll_until(lambda: server.held(0) == {old, new})
    await server.poll()
    assert (server.state(number), server.routes(), server.held(1)) == ("pending", Routes(), {old})
    engines[1].withholds_mounts = False
    server.in_flight = (InFlight(ENDPOINT, old, 1),)
    await server.poll_until(lambda: server.routes().routes)
    assert server.state(number) == "serving"
    await server.poll()
    assert server.held(0) == server.held(1) == {old, new}  # a request still needs the old one
    server.in_flight = ()
    await server.poll_until(lambda: server.held(0) == server.held(1) == {new})


@TWO_ENGINES
async def test_a_version_that_cannot_be_loaded_fails_and_the_old_one_serves(server, engines):
    engines[1].mount_error = "its weights are not numbers."
    number = deploy(server)
    await server.poll_until(lambda: server.state(number) == "failed")
    assert "engine-1: its weights are not numbers." in server.store.find(number).last_change.why
    await server.poll_until(lambda: server.held(0) == server.held(1) == {server.configured.fingerprint})
    assert server.routes() == Routes()


async def test_a_version_whose_engine_ends_while_it_loads_is_tried_again_and_then_fails(server, engines):
    (engine,) = engines
    engine.withholds_mounts = True
    number = deploy(server)
    for restart in range(1, 3):
        await server.poll_until(lambda restart=restart: len(engine.model_changes) >= restart)
        engine.set_state("dead")
        await server.poll_until(lambda: not server.engines[0].is_ready)
        engine.set_state("ready")
    await server.poll_until(lambda: server.state(number) == "failed")
    assert "ended 2 times" in server.store.find(number).last_change.why


async def test_the_next_registrar_completes_what_one_has_begun(server, engines):
    engines[0].withholds_mounts = True
    number = deploy(server)
    await server.poll_until(lambda: engines[0].model_changes)
    await server.deployer.close()
    await server.registry.close()
    engines[0].withholds_mounts = False
    server.now += 60.0  # its lease has run out
    server.start_registrar("second")
    await server.poll_until(lambda: server.state(number) == "serving")


async def test_a_registrar_that_ends_stops_reading_a_folder(server, tmp_path, folders):
    def is_reading() -> bool:
        return any(thread.name.startswith("hash") for thread in threading.enumerate())

    long = tmp_path / "long"
    shutil.copytree(folders[1], long)
    ModelStore(server.engine).add("shapes", read_model(str(long)), server.change())
    (long / "later.bin").touch()
    os.truncate(long / "later.bin", 2**37)  # sparse; minutes to read
    number = deploy(server)
    await server.poll_until(is_reading)
    await server.deployer.close()
    await wait_until_async(lambda: not is_reading(), 10)
    assert server.state(number) == "pending"


async def test_a_bad_canary_is_rolled_back_and_a_good_one_promoted(server):
    bad = deploy(server, plan=RampPlan((50.0, 100.0), 10.0))
    await server.poll_until(lambda: server.routes().routes)
    assert server.routes().find(ENDPOINT).canary_share == 0.5
    for _ in range(2):
        await send_windows(server, bad, errors=20)
    await server.poll_until(lambda: server.state(bad) == "rolled_back")
    last = server.store.find(bad).last_change
    assert (last.by, "errors" in last.why) == ("judge", True)
    await server.poll_until(lambda: server.held() == {server.configured.fingerprint})

    good = deploy(server, plan=RampPlan((50.0, 100.0), 10.0), judges_latency=False)
    await server.poll_until(server.routes_to_canary)
    for _ in range(40):
        await send_windows(server, good, errors=0)
        if server.state(good) == "serving":
            break
    assert server.state(good) == "serving"
    assert server.store.find(good).evidence.num_canary > 0


async def test_a_canary_whose_results_are_distributed_otherwise_is_rolled_back(server):
    number = deploy(server, plan=RampPlan((50.0,)), guards=("image_brightness",))
    await server.poll_until(server.routes_to_canary)
    for _ in range(4):
        arms = [Arm(50, cells={"image_brightness": {cell: 40, "0.5": 10}}) for cell in ("0.4", "0.6")]
        server.windows.append(WindowReport(number, int(server.now / WINDOW_S), *arms))
        await server.poll()
        server.now += WINDOW_S + 1
    await server.poll_until(lambda: server.state(number) == "rolled_back")
    assert server.store.find(number).last_change.why.startswith("image_brightness: another distribution")


async def send_windows(server: Server, number: int, errors: int) -> None:
    """Serve a hundred requests, half of them by the canary, and let the window end."""
    arms = Arm(50, 0), Arm(50, errors)
    server.windows.append(WindowReport(number, int(server.now / WINDOW_S), *arms))
    await server.poll()
    server.now += WINDOW_S + 1
    await server.poll()


async def test_the_registry_gets_to_know_the_few_responses_of_a_quiet_endpoint(server):
    number = deploy(server, plan=CANARY)
    await server.poll_until(server.routes_to_canary)
    server.windows.append(WindowReport(number, int(server.now / WINDOW_S), Arm(9), Arm(2)))
    await server.poll()
    server.now += WINDOW_S + 1
    await server.poll()
    evidence = server.store.find(number).evidence
    assert (evidence.num_canary, evidence.waiting_canary, evidence.waiting_control) == (0, 2, 9)


async def test_a_canary_that_fails_while_the_registry_is_away_gets_no_more_requests(server):
    number = deploy(server, plan=CANARY)
    await server.poll()  # which begins to load it
    await wait_until_async(lambda: server.routes().routes)
    await server.lose_registry()  # in the moment after its routes were written, before the next poll
    await send_windows(server, number, errors=40)
    assert server.state(number) == "canary"
    assert server.routes().find(ENDPOINT).canary is None
    server.is_away = False
    await server.poll_until(lambda: server.state(number) == "rolled_back")


async def test_a_damaged_registry_changes_nothing_and_a_repaired_one_goes_on(server, tmp_path):
    old, new = (spec.fingerprint for spec in server.specs)
    deploy(server)
    await server.poll_until(lambda: server.held() == {new})
    routes = server.routes()
    await server.registry._call(server.registry._dispose)
    server.engine.dispose()
    database = tmp_path / "registry.sqlite"
    database.rename(tmp_path / "good")  # closed, so all is in this file
    database.write_bytes(b"this is no database" * 1000)
    for _ in range(3):
        await server.poll()
    assert (server.routes(), server.held()) == (routes, {new})
    await server.registry._call(server.registry._dispose)
    (tmp_path / "good").rename(database)
    server.store.roll_back(ENDPOINT, server.change())
    await server.poll_until(lambda: server.held() == {old})


async def test_a_shadow_is_counted_and_ends_and_its_version_is_released(server):
    old, new = (spec.fingerprint for spec in server.specs)
    number = deploy(server, shadow=ShadowPlan(20.0, max_answers=100))
    await server.poll_until(lambda: server.routes().routes)
    assert (server.state(number), server.routes().find(ENDPOINT).shadow.fingerprint) == ("shadow", new)
    for expected in (1, 2, 2, 4):  # events, when the number doubled
        server.shadows.append(ShadowReport(number, ShadowCounts(num_answers=1, num_dropped=1)))
        await server.poll()
        assert server.store.find(number).shadow.counts.num_answers == expected
    await server.deployer.close()  # the next registrar goes on
    await server.registry.close()
    server.start_registrar("first")
    await server.poll()
    server.shadows.append(ShadowReport(number, ShadowCounts(num_answers=96)))
    await server.poll_until(lambda: server.state(number) == "ended")
    assert "100 copies answered" in server.store.find(number).last_change.why
    await server.poll_until(lambda: server.held() == {old})


@pytest.mark.parametrize("is_promoted", [True, False])
async def test_a_shadow_that_is_promoted_or_over_is_judged_as_a_canary(server, is_promoted):
    number = deploy(server, plan=RampPlan((50.0,)), shadow=ShadowPlan(20.0, max_answers=3))
    await server.poll_until(lambda: server.routes().routes)
    if is_promoted:
        server.store.promote(ENDPOINT, server.change())
    else:
        server.shadows.append(ShadowReport(number, ShadowCounts(num_answers=3)))
    await server.poll_until(lambda: server.routes().find(ENDPOINT).canary is not None)
    assert server.routes().find(ENDPOINT).canary_share == 0.5
    for _ in range(2):
        await send_windows(server, number, errors=20)
    await server.poll_until(lambda: server.state(number) == "rolled_back")


async def test_an_engine_that_starts_again_gets_what_is_deployed(server, engines):
    new = server.specs[1].fingerprint
    deploy(server)
    await server.poll_until(lambda: server.held() == {new})
    engines[0].set_state("dead")
    await server.poll_until(lambda: not server.engines[0].is_ready)
    engines[0].set_state("ready")  # with the model of its first start
    await server.poll_until(lambda: server.held() == {new})


async def test_nothing_is_released_before_the_front_ends_have_reported(server, engines):
    old, new = (spec.fingerprint for spec in server.specs)
    engines[0].withholds_mounts = True
    deploy(server)
    await server.poll_until(lambda: engines[0].model_changes)
    engines[0].withholds_mounts = False
    await wait_until_async(lambda: server.held() == {old, new})
    server.now += 60.0  # so that no report counts any more
    for _ in range(5):
        await server.poll(reports=False)
    assert server.held() == {old, new}
    await server.poll_until(lambda: server.held() == {new})


async def test_a_version_that_serves_is_kept_though_its_files_are_gone(server, engines, folders):
    new = server.specs[1].fingerprint
    deploy(server)
    await server.poll_until(lambda: server.held() == {new})
    await server.deployer.close()
    await server.registry.close()
    folders[1].rename(folders[1].with_name("away"))
    try:
        server.start_registrar("second")
        for _ in range(5):
            await server.poll()
        assert server.held() == {new}
        engines[0].set_state("dead")  # its next process has the configuration's model, which then serves
        await server.poll_until(lambda: not server.engines[0].is_ready)
        engines[0].set_state("ready")
        await server.poll_until(lambda: server.engines[0].is_ready)
        for _ in range(5):
            await server.poll()
        assert server.held() == {server.configured.fingerprint}
    finally:
        folders[1].with_name("away").rename(folders[1])


async def test_a_version_that_jobs_need_is_kept_and_loaded_again(server, engines, tmp_path):
    old, new = (spec.fingerprint for spec in server.specs)
    jobs = JobStore(open_jobs_database("auto", tmp_path))
    job = NewJob(new_job_id(), ENDPOINT, old, b"{}", b"{}", "http://noria.test/")
    record, _ = jobs.accept(job, 9, server.now)
    deploy(server)
    await server.poll_until(lambda: server.held() == {old, new})
    engines[0].models = (server.specs[1],)  # as the supervisor starts it again: with what is routed
    engines[0].set_state("dead")
    await server.poll_until(lambda: not server.engines[0].is_ready)
    engines[0].set_state("ready")
    await server.poll_until(lambda: server.tick() and server.held() == {old, new})
    jobs.cancel(record.id, server.now)
    await server.poll_until(lambda: server.held() == {new})
    jobs.close()


async def test_checkpoints_that_front_ends_have_loaded_are_left_to_them(server, engines):
    (name,) = CHECKPOINTS
    frontend = MountClient("engine-0", engines[0].address, "diffusion")
    server.tasks.append(asyncio.create_task(frontend.run()))
    await wait_until_async(lambda: frontend.is_ready)
    assert await frontend.mount(msgspec.structs.replace(server.configured, name=name)) == ""
    number, old = deploy(server), server.configured.fingerprint
    await server.poll_until(lambda: old not in server.held())
    await server.poll_until(lambda: server.state(number) == "serving")
    await wait_until_async(lambda: {spec.name for spec in frontend.models} == {ENDPOINT, name})
    taken = server.store.deploy(name, "shapes@2", None, JudgeSettings(), server.change())[0].id
    await server.poll_until(lambda: server.state(taken) == "failed")
    assert "name of a file in engine.checkpoints" in server.store.find(taken).last_change.why
    assert name in {spec.name for spec in frontend.models}


async def test_a_canary_needs_a_control(server):
    number = server.store.deploy("new", "shapes@2", CANARY, JudgeSettings(), server.change())[0].id
    await server.poll_until(lambda: server.state(number) == "failed")
    assert "compared with" in server.store.find(number).last_change.why


async def test_the_configurations_model_is_loaded_before_a_rolled_back_version_is_released(server, engines):
    old, new = (spec.fingerprint for spec in server.specs)
    deploy(server)
    await server.poll_until(lambda: server.held() == {new})
    engines[0].withholds_mounts = True
    server.store.roll_back(ENDPOINT, server.change())
    await server.poll_until(lambda: not server.routes().routes)
    await server.poll()
    assert server.held() == {new}
    engines[0].withholds_mounts = False
    await server.poll_until(lambda: server.held() == {old})


@pytest.mark.parametrize("how", [{}, {"plan": CANARY}, {"shadow": ShadowPlan(20.0)}])
@pytest.mark.parametrize("version", ["minilm", "wide"])
async def test_what_clients_of_the_endpoint_would_notice_fails(server, engines, version, how, wide):
    source, words = {
        "minilm": ("minilm", "task embedding, 384 numbers for each text"),
        "wide": (str(wide), "default_width_px 64 instead of 32"),
    }[version]
    ModelStore(server.engine).add(version, read_model(source), server.change())
    number = deploy(server, version, **how)
    await server.poll_until(lambda: server.state(number) == "failed")
    assert words in server.store.find(number).last_change.why
    assert engines[0].model_changes == []


async def test_a_version_is_compared_with_what_serves_unless_it_has_served_before(server, wide):
    ModelStore(server.engine).add("wide", read_model(str(wide)), server.change())
    first = deploy(server, "shapes@2")
    await server.poll_until(lambda: server.state(first) == "serving")
    old = deploy(server, "wide")  # as servers before this comparison had it
    assert server.store.try_lease(old, "old", server.now, 10.0)
    server.store.mounted(old, "old", server.change())
    number = deploy(server, "shapes@1")
    await server.poll_until(lambda: server.state(number) == "failed")
    assert "default_width_px 32 instead of 64" in server.store.find(number).last_change.why
    again = deploy(server, "shapes@2")
    await server.poll_until(lambda: server.state(again) == "serving")


async def test_files_that_changed_since_the_version_was_added_are_not_loaded(server, engines, folders):
    (folders[1] / "tokenizer" / "added.txt").write_text("a")
    try:
        number = deploy(server)
        await server.poll_until(lambda: server.state(number) == "failed")
    finally:
        (folders[1] / "tokenizer" / "added.txt").unlink()
    assert "added.txt changed since" in server.store.find(number).last_change.why
    assert engines[0].model_changes == []


@TWO_ENGINES
async def test_a_swap_replaces_the_version_on_one_engine_after_the_other(server, engines):
    old, new = (spec.fingerprint for spec in server.specs)
    for engine in engines:
        engine.max_models = 1
    failed = deploy(server)
    await server.poll_until(lambda: server.state(failed) == "failed")
    assert server.held(0) == server.held(1) == {old}
    engines[0].withholds_mounts = True
    number = deploy(server, swap=True)
    await server.poll_until(lambda: not server.held(0))
    for _ in range(5):
        await server.poll()
    assert (server.held(0), server.held(1), server.state(number)) == (set(), {old}, "pending")
    engines[0].withholds_mounts = False
    await server.poll_until(lambda: server.state(number) == "serving")
    assert server.held(0) == server.held(1) == {new}
    server.store.roll_back(ENDPOINT, server.change())  # to the configuration's model
    await server.poll_until(lambda: server.held(0) == server.held(1) == {old})


@TWO_ENGINES
async def test_what_a_failed_swap_has_replaced_is_brought_back(server, engines):
    old, new = (spec.fingerprint for spec in server.specs)
    for engine in engines:
        engine.max_models = 1
    engines[1].mount_error = "its weights are not numbers."
    number = deploy(server, swap=True)
    await server.poll_until(lambda: server.state(number) == "failed")
    await server.poll_until(lambda: server.held(0) == server.held(1) == {old})
    swapped = [(change.model.fingerprint, change.replaces) for change in engines[0].model_changes]
    assert swapped[0] == (new, ((ENDPOINT, old),)) and swapped[-1] == (old, ((ENDPOINT, new),))
    assert server.routes() == Routes()


async def test_a_swap_is_completed_or_taken_back_by_the_next_registrar(server, engines):
    old, new = (spec.fingerprint for spec in server.specs)
    engines[0].max_models = 1
    for is_cancelled, wanted in ((True, {old}), (False, {new})):
        engines[0].withholds_mounts = True
        number = deploy(server, swap=True)
        await server.poll_until(lambda: not server.held())
        await server.deployer.close()
        await server.registry.close()
        if is_cancelled:
            server.store.roll_back(ENDPOINT, server.change())
        engines[0].withholds_mounts = False
        server.start_registrar("first")
        await server.poll_until(lambda wanted=wanted: server.held() == wanted)
        await server.poll_until(lambda number=number: server.state(number) in ("serving", "rolled_back"))

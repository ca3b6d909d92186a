"""Brings engines and routes to what the registry wants, in steps that can be repeated at any time.

Each call of `poll` looks at everything anew: it begins what is missing and waits for nothing. So a registrar that was
killed, an engine that was, or a registry that is away leave nothing half done: the next call goes on.

    pending       load its version on all engines of its kind, then write its first routes; a failure ends it
    shadow        add up what front ends count of it, end it
    canary        judge it, advance its ramp
    routes        published to the front ends, when the registry has new ones
    other models  unmounted when no route, no request and no job needs them
"""

import asyncio
import functools
import logging
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from typing import Any

import msgspec

from noria.canary.judge import Verdict
from noria.canary.ramp import weight
from noria.canary.shadow import ShadowState, is_progress
from noria.canary.windows import FrontendReport
from noria.errors import NoriaError
from noria.observe.logs.log_record import fields
from noria.observe.metrics import declarations
from noria.protocol.kinds import AnyModelSpec
from noria.protocol.model_spec import ModelKey
from noria.protocol.routes import Route, Routes, Target
from noria.registrar.frontend_reports import FrontendReports
from noria.registrar.mount_client import EngineGoneError, MountClient
from noria.registrar.mounting import engines_for, mount_beside, swap
from noria.registrar.registry_access import RegistryAccess, RegistryAwayError, RegistryState
from noria.registrar.running_canary import RunningCanary
from noria.registrar.running_shadow import RunningShadow
from noria.registry.deployments import states as rules
from noria.registry.deployments.client_interface import check_fits
from noria.registry.deployments.routed_models import open_target, targets_of
from noria.registry.deployments.states import Deployment

_LOOK_FOR_JOBS_S = 5.0
_RETRY_S = 30.0  # until a version that an engine could not load again is tried once more
_NO_ENGINE_WAIT_S = 1.0

log = logging.getLogger("noria.registrar")


class _ClosedError(Exception):
    """Ends the reading of a folder for a deployer that is closed."""


class Deployer:
    """Carries out the deployments of one server."""

    def __init__(
        self,
        configured: Sequence[AnyModelSpec],
        engines: Sequence[MountClient],
        registry: RegistryAccess,
        publish: Callable[[Routes], None],
        routes: Routes,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        roots: Sequence[str] = (),
        checkpoints: Collection[str] = (),
    ) -> None:
        """`configured` are the models of the configuration, `routes` those that front ends follow now.

        `engines` may change between polls. `publish` gives front ends other routes; it raises OSError. `roots` are
        `registry.source_roots`, `checkpoints` names of models that front ends have loaded.
        """
        self._checkpoints = checkpoints
        self._configured, self._engines, self._registry = configured, engines, registry
        self._publish, self._clock, self._monotonic = publish, clock, monotonic
        self._roots, self._open_target = roots, functools.partial(open_target, roots=roots)
        self._routes = self._published = routes
        self._reports = FrontendReports()
        self._canaries: dict[int, RunningCanary] = {}  # by deployment
        self._shadows: dict[int, RunningShadow] = {}  # by deployment
        self._unfinished: dict[int, Deployment] = {}  # as the registry last said
        self._following = asyncio.Lock()
        self._failed_canaries: set[int] = set()  # that get no requests, though the registry does not know yet
        self._loading: dict[int, asyncio.Task[None]] = {}  # by deployment; each named by its endpoint
        self._changing: dict[tuple[str, ModelKey], asyncio.Task[None]] = {}  # mounts and unmounts, by engine
        self._retry_at: dict[tuple[str, ModelKey], float] = {}
        self._specs: dict[tuple[str, str], AnyModelSpec] = {}  # specs of deployed versions, by endpoint and digest
        self._seen = {spec.key: spec for spec in configured}  # what engines have held, too
        self._look_for_jobs_at = 0.0  # by the monotonic clock
        self._is_closed = threading.Event()

    def add_report(self, report: FrontendReport) -> None:
        """Take a front end's report."""
        self._reports.add(report, self._monotonic())
        for window in report.ended:
            if (canary := self._canaries.get(window.deployment)) is not None:
                canary.add(window)
        for shadow in report.shadows:
            if shadow.deployment in self._shadows:
                self._shadows[shadow.deployment].add(shadow.counts)

    async def poll(self) -> None:
        """Do what can be done now."""
        now = self._clock()
        for engine in self._engines:
            self._seen.update((spec.key, spec) for spec in engine.models)
        self._reports.forget_silent(self._monotonic())
        state = await self._follow_registry()
        unfinished = () if state is None else state.unfinished
        for deployment in unfinished:
            is_ours = deployment.state == "pending" and await self._registry.lease(deployment.id)  # renewed, too
            if is_ours and deployment.id not in self._loading:
                self._loading[deployment.id] = asyncio.create_task(self._load(deployment), name=deployment.endpoint)
        for deployment_id in [one for one, task in self._loading.items() if task.done()]:
            del self._loading[deployment_id]
        swapping = {one.endpoint for one in unfinished if one.swap and one.id in self._loading}
        await self._advance_canaries(now, registry_answers=state is not None)
        if state is not None:
            await self._advance_shadows(now)
        self._publish_routes()  # again: a canary may have failed
        await self._mount_missing(now, swapping)
        await self._unmount_surplus()

    async def _follow_registry(self) -> RegistryState | None:
        """Read what the registry wants, and write its routes into the file; return None if it is away."""
        async with self._following:  # else an older state could follow a newer one
            state = await self._registry.read()
            if state is not None:
                self._unfinished = {deployment.id: deployment for deployment in state.unfinished}
                await self._watch_new(state.unfinished)  # first: no canary gets a request before it is judged
                self._routes = state.routes
                self._failed_canaries &= self._unfinished.keys()
                self._publish_routes()
            return state

    async def close(self) -> None:
        """Stop, at once also while a folder is read; mounts that have begun are completed by their engines."""
        self._is_closed.set()
        tasks = [*self._loading.values(), *self._changing.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ── Loading a new version ──────────────────────────────────────────────────────────────────────────────────────

    async def _load(self, deployment: Deployment) -> None:
        """Load a pending deployment's version and begin it, or record why that failed."""
        version = deployment.version
        extra = fields(event="deployment_loading", deployment=deployment.id, endpoint=deployment.endpoint)
        log.info("deployment %d: loading %s for %s", deployment.id, version.name, deployment.endpoint, extra=extra)
        try:
            target = rules.target_of(deployment)
            serving = before = await self._serving(deployment.endpoint)
            is_at_once = deployment.plan is None and deployment.shadow_plan is None
            if is_at_once and await self._registry.was_replaced(deployment.endpoint, version):
                before = None  # a way back: clients know it
            if before is not None and (known := await self._open(deployment.endpoint, target)) is not None:
                check_fits(version.name, known, before)  # before all of its files are read
            manifest = await self._registry.manifest(version)
            spec = await asyncio.to_thread(
                self._open_target, deployment.endpoint, target, manifest, self._end_if_closed
            )
            if before is not None:
                check_fits(version.name, spec, before)
            await self._mount(deployment, spec, serving)
            if self._roots:  # others may have changed what the engine loaded, after it was checked
                await asyncio.to_thread(self._open_target, deployment.endpoint, target)
        except RegistryAwayError:
            return  # the next poll begins again
        except NoriaError as error:
            extra = fields(event="deployment_failed", deployment=deployment.id, endpoint=deployment.endpoint)
            log.error("deployment %d failed: %s", deployment.id, error.message, extra=extra)
            await self._registry.fail(deployment.id, error.message)
            return
        self._specs[deployment.endpoint, version.digest] = spec
        if await self._registry.begin(deployment.id):
            await self._follow_registry()  # at once, so that the file is as new if the server stops now
            extra = fields(event="deployment_loaded", deployment=deployment.id, endpoint=deployment.endpoint)
            log.info("deployment %d: %s is loaded", deployment.id, version.name, extra=extra)

    def _end_if_closed(self, *_: int) -> None:
        if self._is_closed.is_set():
            raise _ClosedError

    async def _mount(self, deployment: Deployment, spec: AnyModelSpec, serving: AnyModelSpec | None) -> None:
        """Mount a version on all engines that are to hold it, unless the deployment ends. Raises RegistryError."""
        mount = swap if deployment.swap else mount_beside
        while deployment.id in self._unfinished:
            engines = engines_for(deployment, spec, serving, self._configured, self._engines, self._checkpoints)
            if await mount(engines, spec):
                return
            await asyncio.sleep(_NO_ENGINE_WAIT_S)  # others take the place of those that left

    async def _serving(self, endpoint: str) -> AnyModelSpec | None:
        """Return the control of an endpoint; None: it has none, or none whose properties are known."""
        configured = next((spec for spec in self._configured if spec.name == endpoint), None)
        route = self._routes.find(endpoint)
        if route is None or route.control is None:
            return configured
        known = self._seen.get(ModelKey(endpoint, route.control.fingerprint))
        return known or await self._open(endpoint, route.control) or configured

    # ── Canaries ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _watch_new(self, unfinished: Iterable[Deployment]) -> None:
        """Begin to judge the canaries, and to count the shadows, whose lease this registrar holds."""
        for one in unfinished:
            if one.state == "canary" and one.id not in self._canaries and await self._registry.lease(one.id):
                self._canaries[one.id] = RunningCanary(one, self._clock())
            if one.state == "shadow" and one.id not in self._shadows and await self._registry.lease(one.id):
                self._shadows[one.id] = RunningShadow(one, self._clock())

    async def _advance_canaries(self, now: float, *, registry_answers: bool) -> None:
        if registry_answers:
            for ended in self._canaries.keys() - self._running("canary"):
                _export(self._canaries.pop(ended).labels, 0.0, 0.0)
        first_open = self._reports.first_open_window()
        for number, canary in list(self._canaries.items()):
            if number in self._failed_canaries and not registry_answers:
                continue
            verdict = canary.advance(first_open, now, registry_answers=registry_answers)
            share = 0.0 if canary.ramp.is_final else weight(canary.plan, canary.ramp)
            _export(canary.labels, share, verdict.e)
            if canary.ramp.status == "rolled_back":
                self._withdraw(number, verdict.reason)
            if registry_answers and number in self._running("canary"):
                await self._step(self._unfinished[number], canary, verdict)

    async def _step(self, deployment: Deployment, canary: RunningCanary, verdict: Verdict) -> None:
        """Let the registry know where a canary stands, if it is worth it."""
        if not await self._registry.lease(deployment.id):  # another server's registrar goes on with it
            del self._canaries[deployment.id]
        elif rules.is_progress(deployment, rules.step(deployment, canary.ramp, canary.evidence)):
            extra = fields(event="deployment_judged", deployment=deployment.id, endpoint=deployment.endpoint)
            log.info("deployment %d is %s: %s", deployment.id, verdict.outcome, verdict.reason, extra=extra)
            await self._registry.step(deployment.id, canary.ramp, canary.evidence, verdict)

    async def _advance_shadows(self, now: float) -> None:
        """Count and end the shadows whose lease this registrar holds."""
        for ended in self._shadows.keys() - self._running("shadow"):
            del self._shadows[ended]
        for number, shadow in list(self._shadows.items()):
            if not await self._registry.lease(number):  # another server's registrar goes on with it
                del self._shadows[number]
                continue
            if number in self._running("shadow"):
                reason, before = shadow.advance(now), self._unfinished[number].shadow or ShadowState()
                if reason is not None or is_progress(before, shadow.state):
                    await self._registry.step_shadow(number, shadow.state, reason or "")

    def _running(self, state: rules.State) -> set[int]:
        return {number for number, one in self._unfinished.items() if one.state == state}

    def _withdraw(self, number: int, reason: str) -> None:
        """Send a failed canary no more requests, whether or not the registry can be told at once."""
        if number not in self._failed_canaries:
            self._failed_canaries.add(number)
            log.warning(
                "deployment %d is rolled back: %s",
                number,
                reason,
                extra=fields(event="deployment_rolled_back", deployment=number),
            )

    # ── Routes and models ──────────────────────────────────────────────────────────────────────────────────────────

    def _publish_routes(self) -> None:
        routes = Routes(
            self._routes.generation, tuple(_without(route, self._failed_canaries) for route in self._routes.routes)
        )
        if routes != self._published:
            try:
                self._publish(routes)
            except OSError as error:
                log.error("the routes cannot be written: %s", error, extra=fields(event="routes_not_written"))
                return
            self._published = routes

    async def _wanted(self) -> dict[ModelKey, AnyModelSpec | None]:
        """Return the models that engines are to hold: the routes', and the configuration's that nothing replaces.

        None: its files cannot be opened, so that it is kept where it is held, and mounted nowhere.
        """
        wanted: dict[ModelKey, AnyModelSpec | None] = {}
        replaced = set()
        for endpoint, target in targets_of(self._routes):
            spec = await self._open(endpoint, target)
            wanted[ModelKey(endpoint, target.fingerprint)] = spec
            route = self._routes.find(endpoint)
            if route is not None and route.control == target and (spec is not None or self._is_held(endpoint, target)):
                replaced.add(endpoint)
        return wanted | {spec.key: spec for spec in self._configured if spec.name not in replaced}

    async def _open(self, endpoint: str, target: Target) -> AnyModelSpec | None:
        if (endpoint, target.digest) not in self._specs:
            try:
                self._specs[endpoint, target.digest] = await asyncio.to_thread(self._open_target, endpoint, target)
            except (NoriaError, OSError):  # the supervisor has logged it, or the version was opened before
                return None
        return self._specs[endpoint, target.digest]

    def _is_held(self, endpoint: str, target: Target) -> bool:
        return any(engine.holds(ModelKey(endpoint, target.fingerprint)) for engine in self._engines)

    async def _mount_missing(self, now: float, swapping: set[str]) -> None:
        """Mount what engines need and do not hold, for instance what one has lost by starting again.

        Of endpoints that are `swapping` nothing: their versions do not fit beside each other.
        """
        wanted = await self._wanted()
        missing = [spec for spec in wanted.values() if spec is not None and spec.name not in swapping]
        missing += [spec for spec in await self._needed_by_jobs() if spec.key not in wanted]
        for spec in missing:
            for engine in self._engines:
                place = engine.name, spec.key
                if (
                    engine.can_hold(spec)
                    and engine.is_ready
                    and not engine.holds(spec.key)
                    and place not in self._changing
                    and self._retry_at.get(place, 0.0) <= now
                ):
                    surplus = [each.key for each in engine.models if each.name == spec.name and each.key not in wanted]
                    self._change(place, self._mount_again(engine, spec, surplus if spec.key in wanted else []))

    async def _needed_by_jobs(self) -> list[AnyModelSpec]:
        """Return the models that engines have lost by starting again, though jobs or requests still need them."""
        if self._monotonic() < self._look_for_jobs_at:
            return []
        self._look_for_jobs_at = self._monotonic() + _LOOK_FOR_JOBS_S
        lost = [spec for key, spec in self._seen.items() if not any(engine.holds(key) for engine in self._engines)]
        return [spec for spec in lost if self._reports.needs(spec.key) or await self._registry.jobs_need(spec.key)]

    async def _mount_again(self, engine: MountClient, spec: AnyModelSpec, surplus: list[ModelKey]) -> None:
        """Mount a model; if that fails, instead of `surplus`, which no route needs, where a swap was asked for."""
        try:
            error = await engine.mount(spec)
            if error and surplus and await self._registry.may_swap(spec.name):
                error = await engine.mount(spec, surplus)
        except EngineGoneError:
            return
        if error:  # which the engine has logged
            self._retry_at[engine.name, spec.key] = self._clock() + _RETRY_S

    async def _unmount_surplus(self) -> None:
        """Unmount what no route, request or job needs, once what replaces it is there."""
        wanted = await self._wanted()
        if self._published != self._routes or not self._reports.follow(self._routes.generation):
            return
        loading = {task.get_name() for task in self._loading.values()}
        for engine in self._engines:
            surplus = [spec for spec in engine.models if spec.key not in wanted]
            missing = {key.name for key in wanted if not engine.holds(key)}
            for spec in surplus[: len(engine.models) - 1]:  # an engine keeps its last model
                place = engine.name, spec.key
                is_waiting = place in self._changing or self._retry_at.get(place, 0.0) > self._clock()
                if spec.name in missing | loading or is_waiting or self._reports.needs(spec.key):
                    continue
                if not await self._registry.jobs_need(spec.key):
                    self._change(place, self._unmount(engine, spec))

    async def _unmount(self, engine: MountClient, spec: AnyModelSpec) -> None:
        try:
            error = await engine.unmount(spec.key)
        except EngineGoneError:
            return
        if error:
            self._retry_at[engine.name, spec.key] = self._clock() + _RETRY_S
            extra = fields(event="unmount_failed", engine=engine.name, model=spec.name, model_version=spec.fingerprint)
            log.warning("%s cannot release %s: %s", engine.name, spec.name, error, extra=extra)

    def _change(self, place: tuple[str, ModelKey], change: Coroutine[Any, Any, None]) -> None:
        task = self._changing[place] = asyncio.create_task(change)
        task.add_done_callback(lambda _: self._changing.pop(place, None))


def _export(labels: tuple[str, str], share: float, evidence: float) -> None:
    """Set the metrics of a canary, by endpoint and version."""
    declarations.CANARY_SHARE.labels(*labels).set(share)
    declarations.CANARY_EVIDENCE.labels(*labels).set(evidence)


def _without(route: Route, failed: set[int]) -> Route:
    """Return the route without a canary that has failed."""
    if route.canary is None or route.canary.deployment not in failed:
        return route
    return msgspec.structs.replace(route, canary=None, canary_share=0.0)

"""Loading a version on all engines of its kind: beside what they hold, or instead of it.

A swap goes from engine to engine, so where there are several the others serve meanwhile. What a swap that failed leaves
behind, on the engines before the one where it did, `Deployer` brings back: it does so after whatever happened.
"""

import asyncio
from collections.abc import Collection, Iterable, Sequence

from noria.errors import RegistryError
from noria.protocol.kinds import AnyModelSpec
from noria.registrar.mount_client import EngineGoneError, MountClient
from noria.registry.deployments.states import Deployment

_MAX_CRASHES = 2  # crashes of an engine that loads a version, before its deployment fails


def engines_for(
    deployment: Deployment,
    spec: AnyModelSpec,
    serving: AnyModelSpec | None,
    configured: Iterable[AnyModelSpec],
    engines: Sequence[MountClient],
    checkpoints: Collection[str] = (),
) -> list[MountClient]:
    """Return the engines that are to load a deployment's version; none if those of its kind are not there now.

    `serving` is the endpoint's control, None if it has none; `checkpoints` are the names that `engine.checkpoints`
    takes. Raises RegistryError: it cannot be deployed here.
    """
    version = deployment.version.name
    if spec.name in checkpoints:
        raise RegistryError(
            f"{spec.name} is the name of a file in engine.checkpoints; deploy {version} to an endpoint of another name."
        )
    if serving is None and (deployment.plan is not None or deployment.shadow_plan is not None):
        raise RegistryError(
            f"{spec.name} has no model that a canary or a shadow could be compared with; deploy {version} without "
            "--canary, --ramp and --shadow."
        )
    kinds = sorted({each.kind for each in (*configured, *engines)})
    if spec.kind not in kinds:
        raise RegistryError(
            f"{version} is of kind {spec.kind}, and this server has only engines of kind {' and '.join(kinds)}. "
            f"Start it with a model of kind {spec.kind}, too."
        )
    return [engine for engine in engines if engine.can_hold(spec)]


async def mount_beside(engines: Sequence[MountClient], spec: AnyModelSpec) -> bool:
    """Mount a version on all engines at once, beside what they hold; return whether one holds it.

    Raises RegistryError.
    """
    if not engines:
        return False
    tasks = [asyncio.create_task(_mount_on(engine, spec, swap=False)) for engine in engines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
    held = [task.result() for task in done]
    return any(held)


async def swap(engines: Sequence[MountClient], spec: AnyModelSpec) -> bool:
    """Mount a version on one engine after the other, instead of the endpoint's others; return whether one holds it.

    Raises RegistryError.
    """
    return any([await _mount_on(engine, spec, swap=True) for engine in engines])


async def _mount_on(engine: MountClient, spec: AnyModelSpec, *, swap: bool) -> bool:
    """Mount a version on an engine, also if it ends meanwhile; return whether it holds it.

    It does not if it has left. Raises RegistryError.
    """
    num_crashes = 0
    while not engine.holds(spec.key):
        if engine.has_left:
            return False
        if not engine.is_ready:  # it is starting
            engine.changed.clear()
            await engine.changed.wait()
            continue
        replaces = tuple(each.key for each in engine.models if swap and each.name == spec.name)
        try:
            error = await engine.mount(spec, replaces)
        except EngineGoneError:
            num_crashes += 1
            if num_crashes >= _MAX_CRASHES:
                raise RegistryError(
                    f"{engine.name} ended {num_crashes} times while it loaded {spec.name} in version "
                    f"{spec.fingerprint}; its log says why."
                ) from None
        else:
            if error:
                raise RegistryError(f"{engine.name}: {error}")
            return True
    return True

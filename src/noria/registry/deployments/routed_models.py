"""The models that a server holds: those of its configuration, and instead or beside them what the routes name."""

import contextlib
from collections.abc import Callable, Sequence

import msgspec

from noria.errors import NoriaError, RegistryError
from noria.models.catalog import open_model
from noria.models.opened_folder import is_below, opened_folder
from noria.protocol.kinds import AnyModelSpec
from noria.protocol.routes import Routes, Target
from noria.registry.manifest import OnRead, differences, report_nothing
from noria.registry.model_folder import folder_of

_MAX_NAMED = 3  # files in one message


def targets_of(routes: Routes) -> list[tuple[str, Target]]:
    """Return all deployed versions with their endpoints, each endpoint's control first."""
    targets = [(route.endpoint, (route.control, route.canary, route.shadow)) for route in routes.routes]
    return [(endpoint, target) for endpoint, of_endpoint in targets for target in of_endpoint if target]


def routed_models(
    configured: Sequence[AnyModelSpec],
    routes: Routes,
    on_error: Callable[[str, Target, str], None],
    roots: Sequence[str] = (),
) -> list[AnyModelSpec]:
    """Return the models that a server with these routes starts with: of each endpoint the control.

    That is the route's or, without one, the configuration's. One that cannot be opened is passed to `on_error` with the
    reason, and the configuration's serves instead. Canaries are loaded beside them later: if one cannot be, the control
    still serves.
    """
    models = {spec.name: spec for spec in configured}
    for route in routes.routes:
        if route.control is not None:
            try:
                models[route.endpoint] = open_target(route.endpoint, route.control, roots=roots)
            except (NoriaError, OSError) as error:
                on_error(route.endpoint, route.control, str(error))
    return list(models.values())


def open_target(
    endpoint: str,
    target: Target,
    manifest: str | None = None,
    on_read: OnRead = report_nothing,
    *,
    roots: Sequence[str] = (),
) -> AnyModelSpec:
    """Return the spec of a deployed version, under the endpoint's name.

    With its `manifest`, all of its files are read and compared: this takes a second for each gigabyte. What `on_read`
    raises ends the reading. Of a folder below one of the `roots`, `registry.source_roots`, no link may lead out of
    them: others may write there.

    Raises RegistryError: its files are nowhere on this machine, or have changed.
    """
    problems = []
    for url in target.urls:
        try:
            folder = folder_of(url)
            if folder is None:
                problems.append(f"{url} is not on this machine")
                continue
            folder = folder.resolve()
            with opened_folder(folder, roots) if is_below(folder, roots) else contextlib.nullcontext(folder) as opened:
                spec = msgspec.structs.replace(open_model(str(opened)), folder=str(folder))
                changed = differences(manifest, opened, on_read) if manifest is not None else []
        except NoriaError as error:
            problems.append(error.message.rstrip("."))
            continue
        if not changed and spec.fingerprint == target.fingerprint:
            return msgspec.structs.replace(spec, name=endpoint)
        named = ", ".join(changed[:_MAX_NAMED]) or "its model"
        problems.append(f"in {folder} {named} changed since {target.version} was added")
    raise RegistryError(
        f"{target.version} cannot be loaded: {'; '.join(problems) or 'the registry knows no place of its files'}. "
        "Restore its files, or add the folder as a new version: noria models add."
    )

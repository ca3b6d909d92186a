"""The models that a server holds: those of its configuration, and instead or beside them what the routes name."""

from collections.abc import Callable, Iterator, Sequence

import msgspec

from noria.errors import NoriaError, RegistryError
from noria.models.catalog import open_model
from noria.protocol.kinds import AnyModelSpec
from noria.protocol.routes import Routes, Target
from noria.registry.manifest import differences
from noria.registry.model_folder import folder_of

_MAX_NAMED = 3  # files in one message


def targets_of(routes: Routes) -> list[tuple[str, Target]]:
    """Return all deployed versions with their endpoints, each endpoint's control first."""
    return [(route.endpoint, target) for route in routes.routes for target in (route.control, route.canary) if target]


def routed_models(
    configured: Sequence[AnyModelSpec], routes: Routes, on_error: Callable[[str, Target, str], None]
) -> list[AnyModelSpec]:
    """Return the models that a server with these routes holds, each endpoint's control first.

    A model of the configuration is left out if its endpoint has another control. A version that cannot be opened is
    passed to `on_error` with the reason; if it is a control, the configuration's model serves instead.
    """
    names = list(dict.fromkeys([*(spec.name for spec in configured), *(route.endpoint for route in routes.routes)]))
    return [spec for name in names for spec in _models_of(name, configured, routes, on_error)]


def _models_of(
    name: str, configured: Sequence[AnyModelSpec], routes: Routes, on_error: Callable[[str, Target, str], None]
) -> Iterator[AnyModelSpec]:
    route = routes.find(name)
    own = [spec for spec in configured if spec.name == name]
    control = None if route is None else _open_or_report(name, route.control, on_error)
    yield from own if control is None else [control]
    canary = None if route is None else _open_or_report(name, route.canary, on_error)
    if canary is not None and canary.key not in {spec.key for spec in (control, *own) if spec is not None}:
        yield canary


def _open_or_report(
    endpoint: str, target: Target | None, on_error: Callable[[str, Target, str], None]
) -> AnyModelSpec | None:
    if target is None:
        return None
    try:
        return open_target(endpoint, target)
    except NoriaError as error:
        on_error(endpoint, target, error.message)
        return None


def open_target(endpoint: str, target: Target, manifest: str | None = None) -> AnyModelSpec:
    """Return the spec of a deployed version, under the endpoint's name.

    With its `manifest`, all of its files are read and compared: this takes a second for each gigabyte.

    Raises:
        RegistryError: its files are nowhere on this machine, or have changed.

    """
    problems = []
    for url in target.urls:
        try:
            folder = folder_of(url)
            if folder is None:
                problems.append(f"{url} is not on this machine")
                continue
            spec = open_model(str(folder))
            changed = differences(manifest, folder) if manifest is not None else []
        except NoriaError as error:
            problems.append(error.message)
            continue
        if not changed and spec.fingerprint == target.fingerprint:
            return msgspec.structs.replace(spec, name=endpoint)
        named = ", ".join(changed[:_MAX_NAMED]) or "its model"
        problems.append(f"in {folder} {named} changed since {target.version} was added")
    raise RegistryError(
        f"{target.version} cannot be loaded: {'; '.join(problems) or 'the registry knows no place of its files'}. "
        "Restore its files, or add the folder as a new version: noria models add."
    )

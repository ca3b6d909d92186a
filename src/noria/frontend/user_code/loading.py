"""Loads the class of an endpoint from its file and checks it: one sentence names file and line of a mistake."""

import asyncio
import inspect
import re
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from noria.config import EndpointConfig
from noria.errors import ConfigError, did_you_mean, short_repr
from noria.frontend.user_code.event_loop import UserEventLoop
from noria.frontend.user_code.threads import UserThreads
from noria.statistics.variables import Variable, code_variables
from noria.storage.private_files import read_own_file
from noria.user_code import Context

_PARAMETERS = {"load": ("ctx",), "preprocess": ("body", "state"), "postprocess": ("result", "state")}
_MAX_STATISTICS = 16  # statistics of a class


class Method(NamedTuple):
    """A method of the class, bound to its object."""

    name: str
    function: Callable[..., Any]
    is_async: bool


@dataclass(frozen=True)
class LoadedCode:
    """An object of the class whose `load` has returned."""

    preprocess: Method | None
    postprocess: Method | None
    variables: Mapping[str, Variable]  # that it records, by name


async def load_code(config: EndpointConfig, context: Context, user_loop: UserEventLoop) -> LoadedCode:
    """Read the file in a thread, make an object of its class and call its `load`, in `user_loop` if that is async.

    Raises ConfigError: the file cannot be read or could be changed by other users, its code or `load` raises or takes
    too long, the class is missing, or has methods or statistics that are not allowed.
    """
    module_name = _module_name(config)
    previous = sys.modules.get(module_name)
    try:
        async with asyncio.timeout(config.load_timeout_s):
            return await _load(config, context, user_loop)
    except BaseException as error:  # what was loaded before stays in use
        sys.modules.pop(module_name, None)
        if previous is not None:
            sys.modules[module_name] = previous
        if isinstance(error, TimeoutError):
            raise ConfigError(
                f"endpoint {config.name!r}: {config.file}: {config.class_name} was not loaded within "
                f"{config.load_timeout_s:g} s. Mend it, or raise load_timeout_s of the endpoint."
            ) from error
        raise


async def _load(config: EndpointConfig, context: Context, user_loop: UserEventLoop) -> LoadedCode:
    threads = UserThreads(1)  # a daemon: one that does not end does not keep the process from ending
    try:
        loaded, error = await threads.run(config.load_timeout_s, _load_in_thread, config, context)
    finally:
        threads.close()
    if error is not None:
        raise error
    methods, variables = loaded
    load = methods.get("load")
    if load is not None and load.is_async:
        _, error = await user_loop.run(config.load_timeout_s, load.function, context)
        if error is not None:
            raise _failure(config, error) from error
    return LoadedCode(methods.get("preprocess"), methods.get("postprocess"), variables)


def _load_in_thread(config: EndpointConfig, context: Context) -> tuple[dict[str, Method], dict[str, Variable]]:
    code_class = _read_class(config)
    try:
        loaded = code_class()
    except BaseException as error:
        raise _failure(config, error) from error
    methods = {name: found for name in _PARAMETERS if (found := _read_method(config, loaded, name)) is not None}
    if not methods.keys() & {"preprocess", "postprocess"}:
        raise _rejected(config, f"the class {config.class_name} has neither preprocess nor postprocess", code_class)
    variables = _read_statistics(config, loaded)
    load = methods.get("load")
    if load is not None and not load.is_async:
        try:
            load.function(context)
        except BaseException as error:
            raise _failure(config, error) from error
    return methods, variables


def _read_class(config: EndpointConfig) -> type:
    """Run the file as a new module, and return its class. Nothing is written beside it, as an import would."""
    file = config.file
    try:
        source = read_own_file(file)
    except OSError as error:
        raise ConfigError(f"endpoint {config.name!r}: {file} cannot be used: {error.strerror or error}.") from error
    module = types.ModuleType(_module_name(config))
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # where dataclasses and pickles look for the names in their annotations
    try:
        exec(compile(source, str(file), "exec"), module.__dict__)  # noqa: S102 - the operator's own code
    except BaseException as error:
        raise _failure(config, error) from error
    found = getattr(module, config.class_name, None)
    if not isinstance(found, type):
        classes = [
            name for name, each in vars(module).items() if isinstance(each, type) and each.__module__ == module.__name__
        ]
        raise ConfigError(
            f"endpoint {config.name!r}: {file} has no class {config.class_name!r}."
            f"{did_you_mean(config.class_name, classes)} It has {', '.join(classes) or 'none'}."
        )
    return found


def _module_name(config: EndpointConfig) -> str:
    return f"noria_endpoint_{re.sub(r'[^a-zA-Z0-9]', '_', config.name)}"


def _read_method(config: EndpointConfig, loaded: object, name: str) -> Method | None:
    function = getattr(loaded, name, None)
    if function is None:
        return None
    wanted = f"{name}({', '.join(('self', *_PARAMETERS[name]))})"
    if not callable(function) or inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise _rejected(config, f"{name} must be a method that returns its result: {wanted}", function)
    try:
        inspect.signature(function).bind(*_PARAMETERS[name])
    except TypeError as error:
        raise _rejected(
            config, f"{name}{inspect.signature(function)} cannot be called as {wanted}: {error}", function
        ) from error
    return Method(name, function, inspect.iscoroutinefunction(function))


def _read_statistics(config: EndpointConfig, loaded: object) -> dict[str, Variable]:
    declared = getattr(loaded, "statistics", {})
    if not isinstance(declared, dict) or len(declared) > _MAX_STATISTICS:
        problem = f"statistics is {short_repr(declared)}; allowed is a dict of at most {_MAX_STATISTICS} names"
        raise _rejected(config, problem, type(loaded))
    try:
        return code_variables({str(name): how for name, how in declared.items()})
    except ValueError as error:
        raise _rejected(config, str(error), type(loaded)) from error


def _failure(config: EndpointConfig, error: BaseException) -> ConfigError:
    """Describe an exception of the code, with its last line in the file."""
    line, text = None, str(error)
    if isinstance(error, SyntaxError) and error.filename == str(config.file):
        line, text = error.lineno, error.msg
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == str(config.file):
            line = frame.tb_lineno
        frame = frame.tb_next
    where = f", line {line}" if line else ""
    message = " ".join(f"{type(error).__name__}: {text}".split()).removesuffix(":")
    return ConfigError(f"endpoint {config.name!r}: {config.file}{where}: {message}.")


def _rejected(config: EndpointConfig, problem: str, what: object) -> ConfigError:
    """`what` is the class or method at fault."""
    try:
        where = f", line {inspect.getsourcelines(what)[1]}"  # type: ignore[arg-type]
    except (OSError, TypeError):
        where = ""
    return ConfigError(f"endpoint {config.name!r}: {config.file}{where}: {problem}.")

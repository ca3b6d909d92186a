"""Reads the file of API keys again when it has changed."""

import asyncio
import logging
from collections.abc import Callable

from noria.errors import ConfigError
from noria.folders import file_version
from noria.frontend.access.api_keys import ApiKey, read_keys
from noria.observe.logs.log_record import fields

_log = logging.getLogger("noria.keys")
_POLL_INTERVAL_S = 2.0


async def follow_keys(setting: str, use: Callable[[tuple[ApiKey, ...]], None]) -> None:
    """Pass the file's keys to `use` now and whenever it has changed, until cancelled.

    A file that cannot be read or is invalid is logged and changes nothing, so the keys of before stay valid.
    """
    last_version = None
    while True:
        version = await asyncio.to_thread(file_version, setting)
        if version != last_version:
            last_version = version
            try:
                use(await asyncio.to_thread(read_keys, setting))
            except ConfigError as error:
                message = "%s The keys of before stay valid."
                _log.error(message, error.message, extra=fields(event="api_keys_rejected"))
        await asyncio.sleep(_POLL_INTERVAL_S)

"""The log of a replica's process, which Ray collects from its stderr."""

import logging
import sys

from noria.config import Config
from noria.observe.logs.setup import stderr_handler


def set_up_logs(replica: str, config: Config) -> None:
    """Write Noria's log lines as a server on one machine does. Ray has configured all other loggers of the process."""
    logger = logging.getLogger("noria")
    logger.addHandler(stderr_handler(replica, config.log_format, sys.stderr))
    logger.setLevel(config.log_level.upper())
    logger.propagate = False

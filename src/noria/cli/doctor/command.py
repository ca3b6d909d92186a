"""`noria doctor`: checks this machine, the installation, the settings and the model; or what is open to whom."""

import argparse
import os
from typing import Any

from noria.cli.parser import Parser, add_command, add_model_and_settings, config_from
from noria.config import Config


def add_to(commands: Any) -> list[Parser]:
    """Add the command; returns its parser."""
    parser = add_command(commands, "doctor", run, "[MODEL] [--security]", "check this machine and a model")
    parser.add_argument("--security", action="store_true", help="print what is open to whom, and nothing else")
    add_model_and_settings(parser)
    return [parser]


def run(arguments: argparse.Namespace) -> int:
    """Check this machine, the installation, the settings and the model: what would fail, and what would be slow.

    With --security: what of a server with these settings is open to whom.
    """
    config = config_from(arguments)
    if arguments.security:
        return _check_security(config)

    from noria.cli.doctor import machine_checks
    from noria.supervisor.listener import open_listeners

    findings = machine_checks.examine(config, open_listeners)
    print(machine_checks.format_report(findings))
    return 1 if any(finding.verdict == "fail" for finding in findings) else 0


def _check_security(config: Config) -> int:
    from noria.cli.doctor.security_checks import check_security

    findings = list(check_security(config, os.environ))
    num_open = sum(finding.verdict != "ok" for finding in findings)
    print(*findings, sep="\n")
    print(f"\n{num_open} of {len(findings)} need a decision." if num_open else "\nNothing is open without need.")
    return 1 if num_open else 0

"""`noria doctor`: checks this machine, the installation, the settings and the model."""

import argparse
from typing import Any

from noria.cli.parser import Parser, add_command, add_model_and_settings, config_from


def add_to(commands: Any) -> list[Parser]:
    """Add the command; returns its parser."""
    parser = add_command(commands, "doctor", run, "[MODEL]", "check this machine and a model")
    add_model_and_settings(parser)
    return [parser]


def run(arguments: argparse.Namespace) -> int:
    """Check this machine, the installation, the settings and the model: what would fail, and what would be slow."""
    config = config_from(arguments)

    from noria.cli import doctor_checks
    from noria.supervisor.listener import listen

    findings = doctor_checks.examine(config, listen)
    print(doctor_checks.format_report(findings))
    return 1 if any(finding.verdict == "fail" for finding in findings) else 0

"""A canary while it runs: its windows, the judge's evidence, and its ramp. Knows no database and no clock."""

import msgspec

from noria.canary import judge, ramp
from noria.canary.judge import JudgeState
from noria.canary.ramp import RampState
from noria.canary.windows import CanaryWindows, WindowReport
from noria.registry.deployments.states import Deployment


class RunningCanary:
    """The state that the registrar keeps of one canary."""

    def __init__(self, deployment: Deployment, now: float) -> None:
        """`deployment` is as the registry has it; the time since its last event was an outage of the registrar."""
        state = deployment.ramp
        assert deployment.plan is not None and state is not None, "a canary has a plan and a ramp"
        self.plan, self._settings = deployment.plan, deployment.judge_settings
        self.labels = deployment.endpoint, deployment.version.name
        self.ramp = RampState(state.status, state.step, state.elapsed_s, now)
        self.evidence = deployment.evidence or JudgeState()
        self._windows = CanaryWindows()

    def add(self, report: WindowReport) -> None:
        """Add what one front end counted."""
        self._windows.add(report)

    def advance(self, first_open: int, now: float, *, registry_answers: bool) -> judge.Verdict:
        """Judge the windows before `first_open`, which are complete, and advance the ramp; return the verdict."""
        for control, canary in self._windows.take(first_open):
            self.evidence = judge.step(self.evidence, control, canary, self._settings)
        waiting_control, waiting_canary = self._windows.num_waiting
        self.evidence = msgspec.structs.replace(
            self.evidence, waiting_control=waiting_control, waiting_canary=waiting_canary
        )
        verdict = judge.verdict(self.evidence, self._settings)
        self.ramp = ramp.advance(self.plan, self.ramp, verdict.outcome, now, registry_answers=registry_answers)
        return verdict

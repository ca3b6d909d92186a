"""A canary while it runs: its windows, the judge's evidence, and its ramp. Knows no database and no clock."""

from noria.canary import judge, ramp
from noria.canary.judge import JudgeSettings, JudgeState
from noria.canary.ramp import RampPlan, RampState
from noria.canary.windows import CanaryWindows, WindowReport


class RunningCanary:
    """What the registrar keeps of one canary."""

    def __init__(
        self, plan: RampPlan, state: RampState, settings: JudgeSettings, evidence: JudgeState | None, now: float
    ) -> None:
        """`state` and `evidence` are as the registry has them; the time since then was an outage of the registrar."""
        self._plan, self._settings = plan, settings
        self.ramp = RampState(state.status, state.step, state.elapsed_s, now)
        self.evidence = evidence or JudgeState()
        self._windows = CanaryWindows()

    def add(self, report: WindowReport) -> None:
        """Add what one front end counted."""
        self._windows.add(report)

    def advance(self, first_open: int, now: float, *, registry_answers: bool) -> judge.Verdict:
        """Judge the windows before `first_open`, which are complete, and advance the ramp; return the verdict."""
        for control, canary in self._windows.take(first_open):
            self.evidence = judge.step(self.evidence, control, canary, self._settings)
        verdict = judge.verdict(self.evidence, self._settings)
        self.ramp = ramp.advance(self._plan, self.ramp, verdict.outcome, now, registry_answers=registry_answers)
        return verdict

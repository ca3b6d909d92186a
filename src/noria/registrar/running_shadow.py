"""A shadow while it runs: what front ends count of it. Knows no database and no clock."""

import msgspec

from noria.canary import shadow
from noria.canary.shadow import ShadowCounts, ShadowState
from noria.registry.deployments.states import Deployment


class RunningShadow:
    """The state that the registrar keeps of one shadow."""

    def __init__(self, deployment: Deployment, now: float) -> None:
        """`deployment` is as the registry has it; the time since its last event was an outage of the registrar."""
        assert deployment.shadow_plan is not None, "a shadow has a plan"
        self._plan, self._max_error_increase = deployment.shadow_plan, deployment.judge_settings.max_error_increase
        self.state = msgspec.structs.replace(deployment.shadow or ShadowState(), updated_at=now)
        self._counts = ShadowCounts()

    def add(self, counts: ShadowCounts) -> None:
        """Add what one front end counted."""
        self._counts += counts

    def advance(self, now: float) -> str | None:
        """Take what was counted; return why the shadow is over, None if it goes on."""
        self.state, self._counts = shadow.advance(self.state, self._counts, now), ShadowCounts()
        end = shadow.end_of(self._plan, self.state, self._max_error_increase)
        return None if end is None else end.reason

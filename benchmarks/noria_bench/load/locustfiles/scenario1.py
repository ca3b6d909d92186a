"""The reference article's scenario 1 for Locust: 1 user, for 15 minutes."""

from noria_bench.benches import scenarios
from noria_bench.load.locustfiles.user import ReferenceUser, add_options

add_options(scenarios.SCENARIOS["scenario1"])


class Scenario1(ReferenceUser):
    """The scenario's user."""

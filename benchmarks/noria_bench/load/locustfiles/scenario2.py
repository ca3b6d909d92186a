"""The reference article's scenario 2 for Locust: 8 users, one more every 50 seconds, for 15 minutes."""

from noria_bench.benches import scenarios
from noria_bench.load.locustfiles.user import ReferenceUser, add_options

add_options(scenarios.SCENARIOS["scenario2"])


class Scenario2(ReferenceUser):
    """The scenario's user."""

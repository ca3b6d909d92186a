"""The correction of predictions that are shown: how much longer a client's requests take than predicted.

A prediction knows the requests that have arrived, and not those that others will send. Where clients share the device
these delay a client with much work, and not one with little; so each client has a correction of its own.
"""

from dataclasses import dataclass, field

_WEIGHT = 0.05  # weight of one finished request
_MIN_RATIO, _MAX_RATIO = 0.5, 4.0  # ratios beyond count as these, so that one request changes little
_MAX_CLIENTS = 1000  # those whose requests ended last


@dataclass(slots=True)
class Corrections:
    """Factors by client: the ratio of actual to predicted durations, of the requests that ended last on average."""

    _factors: dict[str, float] = field(default_factory=dict)  # the client whose request ended last comes last

    def of(self, client: str) -> float:
        """Return the factor for the predictions of a client's requests; 1 until one has ended."""
        return self._factors.get(client, 1.0)

    def learn(self, client: str, actual_s: float, predicted_s: float) -> None:
        """Learn from a request that has ended; one without a prediction is ignored."""
        if predicted_s <= 0.0:
            return
        ratio = min(max(actual_s / predicted_s, _MIN_RATIO), _MAX_RATIO)
        before = self._factors.pop(client, 1.0)
        self._factors[client] = before + _WEIGHT * (ratio - before)
        if len(self._factors) > _MAX_CLIENTS:
            del self._factors[next(iter(self._factors))]

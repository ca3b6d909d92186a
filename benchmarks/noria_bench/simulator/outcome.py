"""The outcome of a simulation."""

from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(slots=True)
class Outcome:
    """Latencies of the finished requests, counts of the others, and what was used."""

    latencies_s: "array[float]" = field(default_factory=lambda: array("d"))
    unserved: Counter[str] = field(default_factory=Counter)  # by reason
    num_images: int = 0  # images of all finished requests, those of the warm-up included
    num_failures: int = 0
    num_interruptions: int = 0
    num_restarted: int = 0  # requests whose device was lost
    device_s: float = 0.0
    max_devices: int = 0
    duration_s: float = 0.0

    def quantile_s(self, share: float) -> float:
        """Return a quantile of the latencies; 0 if no request has finished."""
        return float(np.quantile(np.asarray(self.latencies_s), share)) if len(self.latencies_s) else 0.0

    @property
    def num_requests(self) -> int:
        """All requests."""
        return len(self.latencies_s) + self.unserved.total()

    @property
    def served_share(self) -> float:
        """The share of requests that finished; 1 if there were none."""
        return len(self.latencies_s) / self.num_requests if self.num_requests else 1.0

    @property
    def mean_devices(self) -> float:
        """The mean number of devices, those that start included."""
        return self.device_s / self.duration_s if self.duration_s else 0.0

    def as_dict(self, price_per_hour: float) -> dict[str, Any]:
        """Return the figures of the report; latencies are None if no request has finished."""
        cost = self.device_s / 3600.0 * price_per_hour
        return {
            "requests": self.num_requests,
            "served_share": self.served_share,
            "unserved": dict(self.unserved),
            **{
                f"p{100 * share:g}_s": self.quantile_s(share) if len(self.latencies_s) else None
                for share in (0.5, 0.9, 0.99)
            },
            "images": self.num_images,
            "mean_devices": self.mean_devices,
            "cost": cost,
            "cost_per_1000_images": 1000.0 * cost / self.num_images if self.num_images else 0.0,
            "failures": self.num_failures,
            "interruptions": self.num_interruptions,
            "restarted": self.num_restarted,
        }

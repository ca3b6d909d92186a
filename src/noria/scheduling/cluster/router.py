"""Ranks the replicas that can take a request by the work that is queued at each."""

from collections.abc import Iterable
from typing import NamedTuple

from noria.protocol.model_spec import ModelKey


class ReplicaLoad(NamedTuple):
    """The facts that are known of a replica."""

    name: str
    models: frozenset[ModelKey]
    backlog_s: float  # as it reported last
    sent_s: float = 0.0  # predicted work that was sent to it after that report
    is_draining: bool = False


def rank_replicas(replicas: Iterable[ReplicaLoad], model: ModelKey) -> list[str]:
    """Return the replicas that hold `model` and are not draining, the one with the least backlog first.

    A model without a version means any version.
    """
    able = [
        (replica.backlog_s + replica.sent_s, number, replica.name)
        for number, replica in enumerate(replicas)
        if not replica.is_draining and _holds(replica.models, model)
    ]
    return [name for _, _, name in sorted(able)]


def _holds(models: frozenset[ModelKey], model: ModelKey) -> bool:
    return model in models or (not model.version and any(each.name == model.name for each in models))

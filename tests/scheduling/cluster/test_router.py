"""The choice of the replica that gets a request."""

from noria.protocol.model_spec import ModelKey
from noria.scheduling.cluster.router import ReplicaLoad, rank_replicas

OLD, NEW = ModelKey("m", "1"), ModelKey("m", "2")


def test_the_least_work_is_first_with_what_was_sent_since_the_report():
    loads = [
        ReplicaLoad("busy", frozenset([OLD]), 9.0),
        ReplicaLoad("just sent to", frozenset([OLD]), 1.0, sent_s=5.0),
        ReplicaLoad("idle", frozenset([OLD]), 2.0),
    ]
    assert rank_replicas(loads, OLD) == ["idle", "just sent to", "busy"]


def test_replicas_that_drain_or_lack_the_model_get_nothing():
    loads = [
        ReplicaLoad("drains", frozenset([NEW]), 0.0, is_draining=True),
        ReplicaLoad("old", frozenset([OLD]), 1.0),
        ReplicaLoad("new", frozenset([NEW]), 2.0),
    ]
    assert rank_replicas(loads, NEW) == ["new"]
    assert rank_replicas(loads, ModelKey("m")) == ["old", "new"]
    assert rank_replicas(loads, ModelKey("other")) == []

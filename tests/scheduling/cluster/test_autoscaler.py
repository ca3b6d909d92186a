"""How many replicas there are."""

from noria.scheduling.cluster.autoscaler import AutoscalerSettings, BacklogAutoscaler


def make_autoscaler(**settings):
    return BacklogAutoscaler(AutoscalerSettings(1, 8, target_backlog_s=10.0, scale_down_after_s=60.0, **settings))


def test_replicas_are_added_at_once_within_the_bounds():
    autoscaler = make_autoscaler()
    assert autoscaler.decide({"a": 25.0}, 1, 0.0) == 3
    assert autoscaler.decide({"a": 2500.0}, 3, 10.0) == 8


def test_a_replica_without_a_report_counts_as_the_mean_of_the_others():
    assert make_autoscaler().decide({"a": 30.0, "b": None}, 2, 0.0) == 6
    assert make_autoscaler().decide({"a": None, "b": None}, 2, 0.0) == 2
    assert make_autoscaler().decide({}, 3, 0.0) == 3


def test_replicas_are_removed_when_fewer_have_sufficed_for_a_while():
    autoscaler = make_autoscaler()
    assert autoscaler.decide({"a": 10.0, "b": 10.0, "c": 10.0, "d": 10.0}, 4, 0.0) == 4
    quiet = dict.fromkeys("abcd", 3.0)
    assert [autoscaler.decide(quiet, 4, now) for now in (10.0, 30.0, 60.0)] == [4, 4, 4]
    assert autoscaler.decide(quiet, 4, 61.0) == 2

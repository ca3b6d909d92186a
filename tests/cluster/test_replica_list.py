"""Engine replicas on their way from Ray to a front end."""

from noria.cluster.replica_list import ReplicaTable, metadata_of
from noria.protocol.transport import EngineEndpoint

FIRST, SECOND = (EngineEndpoint(name, f"tcp://192.0.2.1:{port}", "key", "tiny") for name, port in (("a", 1), ("b", 2)))


def test_a_follower_hears_what_is_known_and_each_change_until_it_leaves():
    table, heard = ReplicaTable(), []

    def follow(deployment, endpoints):
        heard.append((deployment, [each.name for each in endpoints]))

    table.publish("engine-tiny", [metadata_of(FIRST, "v1", "")])
    table.follow(follow)
    one_silent = [metadata_of(FIRST, "v1", ""), {}, metadata_of(SECOND, "v1", "")]
    table.publish("engine-tiny", one_silent)
    table.publish("engine-tiny", [])
    table.unfollow(follow)
    table.publish("engine-tiny", [metadata_of(FIRST, "v1", "")])
    assert heard == [("engine-tiny", ["a"]), ("engine-tiny", ["a", "b"]), ("engine-tiny", [])]

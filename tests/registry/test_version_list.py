"""The list of all versions, with the deployments that name them."""

from noria.registry import version_list
from noria.registry.version_list import read_version_list


def test_versions_have_their_latest_deployments_and_the_number_of_all(month_old, monkeypatch):
    with month_old.connect() as connection:
        first = read_version_list(connection, None, 4)
        second = read_version_list(connection, first.next, 4)
        monkeypatch.setattr(version_list, "MAX_DEPLOYMENTS", 1)
        latest = read_version_list(connection, None, 1)
        exact = read_version_list(connection, first.next, 2)
    assert [each.name for each in first.data] == ["minilm@1", "shapes@5", "shapes@4", "shapes@3"]
    assert [each.name for each in second.data] == ["shapes@2", "shapes@1"]
    assert (second.next, exact.next) == (None, None)
    versions = {each.name: each for each in first.data + second.data}
    assert versions["shapes@2"].version.removed.why == "its crop was wrong"
    assert versions["shapes@5"].version.aliases == ("next",)
    assert (versions["shapes@2"].num_deployments, versions["shapes@2"].deployments) == (0, [])
    deployed = [(each.id, each.endpoint, each.state) for each in versions["shapes@4"].deployments]
    assert deployed == [(4, "t2i", "rolled_back")]
    encoders = versions["minilm@1"].deployments
    assert [(each.id, each.state) for each in encoders] == [(5, "failed"), (2, "serving")]
    (encoder,) = latest.data
    assert (encoder.num_deployments, encoder.deployments) == (2, encoders[:1])

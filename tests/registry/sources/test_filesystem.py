"""How folders of fsspec's filesystems are listed."""

import re

import fsspec
import pytest

from noria.errors import ModelError
from noria.registry.sources.filesystem import open_filesystem


class ListedFileSystem(fsspec.AbstractFileSystem):
    """Lists what `listings` says of each folder, as sftp or an object store would."""

    protocol = "listed"
    cachable = False

    def ls(self, path, detail=True, **_):
        listed = self.listings[path]
        if isinstance(listed, Exception):
            raise listed
        return listed


@pytest.fixture
def listings(monkeypatch):
    fsspec.register_implementation("listed", ListedFileSystem, clobber=True)
    return lambda found: monkeypatch.setattr(ListedFileSystem, "listings", found, raising=False)


def file(name, size=2, **more):
    return {"name": name, "size": size, "type": "file"} | more


def folder(name):
    return {"name": name, "size": 0, "type": "directory"}


@pytest.mark.parametrize(
    ("then", "now", "is_same"),
    [
        ({"mtime": 1, "time": 1}, {"mtime": 1, "time": 2}, True),  # sftp, smb
        ({"modificationTime": 1, "accessTime": 1}, {"modificationTime": 1, "accessTime": 2}, True),  # webhdfs
        ({"etag": "a", "last_accessed_on": 1}, {"etag": "a", "last_accessed_on": 2}, True),  # adlfs
        ({"mtime": 1}, {"mtime": 2}, False),
        ({"ETag": "a"}, {"ETag": "b"}, False),
        ({"checksum": "a"}, {"checksum": "b"}, False),  # file of a filesystem that is not known
    ],
)
def test_a_folder_is_another_if_its_content_is_not_if_it_was_read(listings, then, now, is_same):
    digests = []
    for stated in (then, now):
        listings({"models": [file("models/config.json", **stated)]})
        digests.append(open_filesystem("listed://models").digest)
    assert (digests[0] == digests[1]) == is_same


@pytest.mark.parametrize("marker", ["models", "models/"])
def test_folders_that_consoles_of_object_stores_make_are_no_files(listings, marker):
    listings(
        {
            "models": [file(marker, 0), folder("models/unet"), file("models/config.json"), file("models/empty.txt", 0)],
            "models/unet": [file(marker.replace("models", "models/unet"), 0), file("models/unet/config.json")],
        }
    )
    found = open_filesystem("listed://models/").files
    assert [each.path for each in found] == ["config.json", "empty.txt", "unet/config.json"]


def test_listing_ends_when_there_are_too_many_files_and_folders(listings):
    asked = []

    class Endless(dict):
        def __missing__(self, path):
            asked.append(path)
            return [folder(f"models/{len(asked)}"), file(f"{path}/config.json")]

    listings(Endless())
    with pytest.raises(ModelError, match="listed://models has more than 10000 files and folders"):
        open_filesystem("listed://models")
    assert len(asked) == 5001


@pytest.mark.parametrize("error", [PermissionError("no access to unet"), FileNotFoundError("unet is gone")])
def test_a_folder_in_it_that_cannot_be_listed_is_not_left_out(listings, error):
    listings({"models": [folder("models/unet"), file("models/config.json")], "models/unet": error})
    with pytest.raises(ModelError, match=re.escape(f"listed://models cannot be read: {error}. Check the URL")):
        open_filesystem("listed://models")


@pytest.mark.parametrize("kind", ["link", "other"])
def test_links_and_devices_are_rejected(listings, kind):
    listings({"models": [file("models/config.json") | {"type": kind}]})
    with pytest.raises(ModelError, match=r"has config\.json, which is a link or a device"):
        open_filesystem("listed://models")

"""The file of API keys: valid files, and the messages about invalid ones."""

import hashlib
import pathlib

import pytest

from noria.errors import ConfigError
from noria.frontend.access.api_keys import ApiKey, check_is_new, generate_key, read_keys

DIGEST = "0" * 64
OTHER_DIGEST = "1" * 64


@pytest.fixture
def file(tmp_path):
    return tmp_path / "keys.toml"


def test_without_a_file_there_are_no_keys():
    assert read_keys("") == ()


def test_the_table_of_a_generated_key_is_valid_and_does_not_contain_the_key(file):
    generated = [generate_key(name) for name in ("alice", "bob")]
    file.write_text("\n".join(table for _, table in generated))
    keys = read_keys(str(file))
    assert [key.name for key in keys] == ["alice", "bob"]
    assert [key.sha256 for key in keys] == [hashlib.sha256(key.encode()).hexdigest() for key, _ in generated]
    assert generated[0][0] not in file.read_text()
    assert len({key for key, _ in generated}) == 2
    assert all(len(key) > 40 for key, _ in generated)  # 256 bits


def test_a_key_may_have_limits(file):
    file.write_text(
        f'[[key]]\nname = "a"\nsha256 = "{DIGEST}"\nmax_images_in_flight = 4\nimages_per_minute = 60\n'
        'priority = "low"\n'
    )
    assert read_keys(str(file)) == (ApiKey("a", DIGEST, 4, 60, "low"),)


def test_a_key_may_have_scopes_and_has_those_of_before_without(file):
    tables = [generate_key("a", ["metrics", "jobs"])[1], generate_key("b")[1]]
    file.write_text("\n".join(tables))
    assert [key.scopes for key in read_keys(str(file))] == [{"jobs", "metrics"}, {"generate", "jobs", "metrics"}]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no .*key.* table"),
        ("key = 3", "has no .*key.* table"),
        ("key = [3]", "key.* 1 is 3; it must be a table"),
        ("[[key", "is not TOML"),
        ("\udcff", "cannot be read"),
        ('[[keys]]\nname = "a"', "unknown key 'keys'"),
        (f'[[key]]\nnam = "a"\nsha256 = "{DIGEST}"', "unknown key 'nam'. Did you mean 'name'?"),
        (f'[[key]]\nsha256 = "{DIGEST}"', "name is missing"),
        ('[[key]]\nname = "a"', "sha256 is missing.*noria key"),
        (f'[[key]]\nname = "a b"\nsha256 = "{DIGEST}"', "name is 'a b'; allowed is 1 to 64"),
        (f'[[key]]\nname = "a\\n"\nsha256 = "{DIGEST}"', "name is .*; allowed is 1 to 64"),
        (f'[[key]]\nname = 3\nsha256 = "{DIGEST}"', "name is 3; allowed is"),
        ('[[key]]\nname = "a"\nsha256 = "swordfish"', "sha256 is not a digest; allowed is"),
        (f'[[key]]\nname = "a"\nsha256 = "{DIGEST}"\nimages_per_minute = 0', "images_per_minute is 0; allowed is"),
        (f'[[key]]\nname = "a"\nsha256 = "{DIGEST}"\nimages_per_minute = 1.5', "images_per_minute is 1.5; allowed is"),
        (f'[[key]]\nname = "a"\nsha256 = "{DIGEST}"\nmax_images_in_flight = true', "max_images_in_flight is true"),
        (f'[[key]]\nname = "a"\nsha256 = "{DIGEST}"\npriority = "urgent"', "priority is 'urgent'; allowed is low"),
        (f'[[key]]\nname = "a"\nsha256 = "{DIGEST}"\nscopes = ["jobs", "root"]', "scopes is .*root.*; allowed is a"),
        (f'[[key]]\nname = "a"\nsha256 = "{DIGEST}"\nscopes = []', r"scopes is \[\]; allowed is a list of some of"),
        (f'[[key]]\nname = "a"\nsha256 = "{DIGEST}"\nscopes = "jobs"', "scopes is 'jobs'; allowed is a list"),
        (f'[[key]]\nname = "a"\nsha256 = "{DIGEST}"\n[[key]]\nname = "a"\nsha256 = "{OTHER_DIGEST}"',
         r"two keys are called 'a', \[\[key\]\] 1 in line 1 and \[\[key\]\] 2 in line 4\. Rename one, or remove"),
        (f'key = [{{name = "a", sha256 = "{DIGEST}"}}, {{name = "a", sha256 = "{OTHER_DIGEST}"}}]',
         r"two keys are called 'a', \[\[key\]\] 1 and \[\[key\]\] 2\. Rename one"),
        (f'[[key]]\nname = "a"\nsha256 = "{DIGEST}"\n[[key]]\nname = "b"\nsha256 = "{DIGEST}"',
         r"'a' and 'b' are the same key, \[\[key\]\] 1 in line 1 .*\. Remove one"),
    ],
)  # fmt: skip
def test_an_invalid_file_is_rejected_with_the_reason(file: pathlib.Path, text, words):
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=words) as caught:
        read_keys(str(file))
    assert str(file) in str(caught.value)
    assert "swordfish" not in str(caught.value)


def test_a_missing_file_is_rejected(file):
    with pytest.raises(ConfigError, match=r"cannot be read.*No such file.*noria key create NAME >> FILE"):
        read_keys(str(file))


@pytest.mark.parametrize("name", ["", "a b", "a\n", "é", "a" * 65, 'a"'])
def test_no_key_is_generated_for_an_invalid_name(name):
    with pytest.raises(ConfigError, match="allowed is 1 to 64"):
        generate_key(name)


def test_a_new_key_has_a_name_that_the_file_does_not_have():
    tables = "".join(f'[[key]]\nname = "{name}"\n' for name in "ab")
    for text in (tables, "", "no TOML", "key = 3", "key = [3]", 'other = "c"'):
        check_is_new("c", text)
    for name, line in (("a", 1), ("b", 3)):
        place = f"[[key]] {1 + (name == 'b')} in line {line}"
        with pytest.raises(ConfigError) as caught:
            check_is_new(name, tables)
        assert str(caught.value).startswith(f"the file has a key '{name}' already, {place}. Take another name")

"""Opening databases: URLs, durability, versions and migrations, and databases that cannot be used."""

import dataclasses

import pytest
import sqlalchemy as sa

from noria.errors import ConfigError, UnavailableNow
from noria.storage.append_only import make_append_only
from noria.storage.database import Schema, database_url, open_database, schema_versions, write_transaction

metadata = sa.MetaData()
notes = sa.Table("test_notes", metadata, sa.Column("text", sa.Text, primary_key=True))
SCHEMA = Schema("notes", setting="notes.database", metadata=metadata)


def open_at(value, tmp_path, schema=SCHEMA):
    return open_database(schema, database_url(schema, value, tmp_path / "notes.sqlite"), num_connections=2)


@pytest.fixture
def engine(database, tmp_path):
    opened = open_at(database, tmp_path)
    yield opened
    opened.dispose()


def add_column(name):
    return lambda connection: connection.execute(sa.text(f"ALTER TABLE test_notes ADD COLUMN {name} TEXT"))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (schema_versions.update().values(version=99), "version 99"),
        (schema_versions.update().values(version=0), "version 0"),
        (schema_versions.delete(), "a development version"),
    ],
    ids=["newer", "unknown", "none"],
)
def test_tables_of_another_version_are_rejected_and_kept(engine, database, tmp_path, change, found):
    with write_transaction(engine) as connection:
        connection.execute(notes.insert().values(text="kept"))
        connection.execute(change)
    with pytest.raises(ConfigError, match=rf"of {found}; .* version 1\. Nothing is changed.*notes\.database"):
        open_at(database, tmp_path)
    with engine.connect() as connection:
        assert connection.scalars(sa.select(notes.c.text)).all() == ["kept"]


def test_tables_without_the_table_of_versions_are_rejected_and_kept(engine, database, tmp_path):
    with write_transaction(engine) as connection:
        connection.execute(notes.insert().values(text="kept"))
        schema_versions.drop(connection)
    with pytest.raises(ConfigError, match="of a development version"):
        open_at(database, tmp_path)
    with engine.connect() as connection:
        assert sa.inspect(connection).get_table_names() == ["test_notes"]
        assert connection.scalars(sa.select(notes.c.text)).all() == ["kept"]


def test_an_older_version_is_migrated_step_by_step_and_keeps_its_rows(engine, database, tmp_path):
    with write_transaction(engine) as connection:
        connection.execute(notes.insert().values(text="kept"))
    newer = dataclasses.replace(SCHEMA, migrations=(add_column("first"),))
    newest = dataclasses.replace(SCHEMA, migrations=(add_column("first"), add_column("second")))
    for schema in (newer, newest, newest):
        opened = open_at(database, tmp_path, schema)
        with opened.connect() as connection:
            assert connection.scalar(sa.select(schema_versions.c.version)) == schema.version
        opened.dispose()
    with engine.connect() as connection:
        assert connection.execute(sa.text("SELECT text, first, second FROM test_notes")).all() == [("kept", None, None)]


def test_a_failed_migration_changes_nothing(engine, database, tmp_path):
    broken = dataclasses.replace(SCHEMA, migrations=(add_column("first"), add_column("first")))
    with pytest.raises(ConfigError, match="cannot be used"):
        open_at(database, tmp_path, broken)
    with engine.connect() as connection:
        assert connection.scalar(sa.select(schema_versions.c.version)) == 1
        assert [column["name"] for column in sa.inspect(connection).get_columns("test_notes")] == ["text"]


def test_schemas_that_share_a_database_have_versions_of_their_own(engine, database, tmp_path):
    other = sa.MetaData()
    sa.Table("test_words", other, sa.Column("text", sa.Text, primary_key=True))
    schema = Schema("words", "words.database", other, migrations=(lambda _: None,))
    open_at(database, tmp_path, schema).dispose()
    with engine.connect() as connection:
        assert set(connection.execute(sa.select(schema_versions)).all()) == {("notes", 1), ("words", 2)}


def test_sqlite_uses_wal_and_syncs_at_each_commit(tmp_path):
    engine = open_at("auto", tmp_path / "new" / "folder")
    with engine.connect() as connection:
        assert connection.execute(sa.text("PRAGMA journal_mode")).scalar() == "wal"
        assert connection.execute(sa.text("PRAGMA synchronous")).scalar() == 2  # FULL
    engine.dispose()
    assert (tmp_path / "new" / "folder" / "notes.sqlite").exists()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("nonsense", "setting notes.database is not a database URL"),
        ("mysql://host/name", "of the kind 'mysql'.*Allowed"),
        ("sqlite://", "in-memory"),
        ("sqlite:///:memory:", "in-memory"),
        ("postgresql://user:hunter2@host/name", "PGPASSFILE"),
        ("postgresql://host/name?password=hunter2", "PGPASSFILE"),
    ],
)
def test_an_invalid_url_is_rejected_without_showing_a_password(value, words, tmp_path):
    with pytest.raises(ConfigError, match=words) as caught:
        database_url(SCHEMA, value, tmp_path)
    assert "hunter2" not in str(caught.value)


def test_a_database_that_cannot_be_reached_is_rejected_with_what_to_do(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be used: .*Set notes\.database, or set data_dir") as caught:
        open_at(f"sqlite:///{tmp_path}/file/notes.sqlite", tmp_path)
    assert type(caught.value) is ConfigError
    with pytest.raises(UnavailableNow, match=r"cannot be used: .*PostgreSQL runs .*set notes\.database"):
        open_at("postgresql://nobody@127.0.0.1:1/none", tmp_path)


def test_a_file_that_is_no_database_is_rejected(tmp_path):
    (tmp_path / "notes.sqlite").write_text("this is plain text and no database, long enough to be read as one" * 99)
    with pytest.raises(ConfigError, match="not a database"):
        open_at("auto", tmp_path)


def test_a_failed_creation_leaves_nothing(database, tmp_path):
    broken = sa.MetaData()
    sa.Table("test_first", broken, sa.Column("text", sa.Text, primary_key=True))
    make_append_only(broken, *broken.tables.values())
    sa.event.listen(broken, "after_create", sa.DDL("INSERT INTO no_such_table VALUES (1)"))
    with pytest.raises(ConfigError, match="cannot be used"):
        open_at(database, tmp_path, dataclasses.replace(SCHEMA, metadata=broken))
    engine = open_at(database, tmp_path, dataclasses.replace(SCHEMA, metadata=sa.MetaData()))
    assert sa.inspect(engine).get_table_names() == ["noria_schema_versions"]
    engine.dispose()

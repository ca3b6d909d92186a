"""Tables of history: the database itself rejects every change to a row and every deletion, also of other programs."""

import sqlalchemy as sa
from sqlalchemy import DDL, ExecutableDDLElement, MetaData, Table

_CHANGES = ("update", "delete")


def make_append_only(metadata: MetaData, *tables: Table) -> None:
    """Give `tables`, which are `metadata`'s, their triggers when they are created."""
    sa.event.listen(
        metadata,
        "before_create",
        _ddl(
            "postgresql",
            "CREATE OR REPLACE FUNCTION noria_append_only() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION USING MESSAGE = TG_TABLE_NAME || ' is append-only'; END $$",
        ),
    )
    for name, table in ((table.name, table) for table in tables):
        for change in _CHANGES:
            trigger = (
                f"CREATE TRIGGER {name}_no_{change} BEFORE {change} ON {name} "
                f"BEGIN SELECT RAISE(ABORT, '{name} is append-only'); END"
            )
            sa.event.listen(table, "after_create", _ddl("sqlite", trigger))
        trigger = (
            f"CREATE TRIGGER {name}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {name} "
            "FOR EACH STATEMENT EXECUTE FUNCTION noria_append_only()"
        )
        sa.event.listen(table, "after_create", _ddl("postgresql", trigger))


def _ddl(dialect: str, statement: str) -> ExecutableDDLElement:
    return DDL(statement).execute_if(dialect=dialect)  # type: ignore[no-untyped-call]

"""Questions about a small database, which the model reads with SQL.

Each trajectory has a database of its own, in memory. Three tools: `tables` lists the tables,
`query` runs a statement, and `answer` ends the trajectory.
"""

import random
import sqlite3
from collections.abc import Iterator
from typing import Any

TABLES = {
    "pets": ("weight", "Rex Milo Luna Coco Nala Oscar Bella Simba"),
    "players": ("points", "Ana Ben Cleo Dan Eva Finn Gus Hana"),
    "fruits": ("price", "apple banana cherry date fig grape kiwi lemon"),
    "cities": ("height", "Oslo Quito Lima Bern Suva Kyiv Rome Doha"),
    "books": ("pages", "Emma Dune Ulysses Beloved Hamlet Heidi Kim Ivanhoe"),
    "ships": ("speed", "Argo Beagle Titanic Vasa Endeavour Victory Fram Golden"),
    "towers": ("floors", "Azure Birch Cedar Delta Ember Flint Grove Haven"),
    "songs": ("seconds", "Yesterday Imagine Hello Halo Thriller Creep Zombie Africa"),
}
"""The number column of each table, and its names."""
KINDS = {
    "How many {table} have more than {n} {column}?": (
        "SELECT COUNT(*) FROM {table} WHERE {column} > {n}"
    ),
    "How many {table} have less than {n} {column}?": (
        "SELECT COUNT(*) FROM {table} WHERE {column} < {n}"
    ),
    "What is the sum of {column} of all {table}?": "SELECT SUM({column}) FROM {table}",
    "What is the highest {column} of the {table}?": "SELECT MAX({column}) FROM {table}",
    "What is the lowest {column} of the {table}?": "SELECT MIN({column}) FROM {table}",
    "What is the {column} of {name} in {table}?": (
        "SELECT {column} FROM {table} WHERE name = '{name}'"
    ),
}
_SHOWN = {
    "question": "How many stones have more than 30 carats?",
    "table": "stones",
    "column": "carats",
    "rows": [["opal", 35], ["ruby", 12], ["jade", 41]],
    "sql": "SELECT COUNT(*) FROM stones WHERE carats > 30",
    "answer": "2",
}
_READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION}
_MAX_STEPS = 100_000  # of SQLite's virtual machine in one statement
_MAX_ROWS = 5


def make_rows(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield rows with the fields question, table, column, rows, sql and answer."""
    rng = random.Random(seed)
    for _ in range(count):
        table, (column, names) = rng.choice([*TABLES.items()])
        chosen = rng.sample(names.split(), rng.randint(4, 8))
        rows = [[name, rng.randint(2, 90)] for name in chosen]
        known = {"table": table, "column": column, "n": rng.randint(10, 80), "name": chosen[0]}
        asked, sql = rng.choice([*KINDS.items()])
        row = {"question": asked.format(**known), "table": table, "column": column, "rows": rows}
        written = sql.format(**known)
        with opened(row) as database:
            (value,) = database.execute(written).fetchone()
        yield {**row, "sql": written, "answer": str(value)}


def opened(row: dict[str, Any]) -> sqlite3.Connection:
    """Return a new database with a row's table, which can only be read."""
    database = sqlite3.connect(":memory:", check_same_thread=False)
    database.execute(f"CREATE TABLE {row['table']} (name TEXT, {row['column']} INTEGER)")
    database.executemany(f"INSERT INTO {row['table']} VALUES (?, ?)", row["rows"])
    database.commit()
    database.set_authorizer(
        lambda action, *_: sqlite3.SQLITE_OK if action in _READING else sqlite3.SQLITE_DENY
    )
    database.set_progress_handler(lambda: 1, _MAX_STEPS)
    return database


class Database:
    """A question about a database; the reward is 1 for the right answer."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.problem = [*solved(_SHOWN), {"role": "user", "content": row["question"]}]
        self.tools = [self.tables, self.query, self.answer]
        self.done = False
        self._row = row
        self._given = ""
        self._database = opened(row)

    def tables(self) -> str:
        """List the tables and their columns."""
        return listed(self._row)

    async def query(self, sql: str) -> str:
        """Run a statement of SQL.

        Args:
            sql: The statement.
        """
        return run(self._database, sql)

    def answer(self, value: str) -> str:
        """Give the answer.

        Args:
            value: The answer.
        """
        self._given, self.done = value.strip(), True
        return "thank you"

    def reward(self, trajectory: Any) -> float:
        """Return 1 for the right answer."""
        return float(self._given == self._row["answer"])

    def close(self) -> None:
        self._database.close()


def listed(row: dict[str, Any]) -> str:
    """Return a row's table and its columns."""
    return f"{row['table']}(name, {row['column']})"


def run(database: sqlite3.Connection, sql: str) -> str:
    """Return the first rows of a statement's result, a line each; an error is raised."""
    rows = database.execute(sql).fetchmany(_MAX_ROWS)
    return "\n".join(", ".join(map(str, row)) for row in rows) or "no rows"


def solved(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the conversation in which a row is solved."""
    steps = [
        ("tables", {}, listed(row)),
        ("query", {"sql": row["sql"]}, row["answer"]),
        ("answer", {"value": row["answer"]}, "thank you"),
    ]
    messages: list[dict[str, Any]] = [{"role": "user", "content": row["question"]}]
    for name, arguments, result in steps:
        function = {"name": name, "arguments": arguments}
        call = {"type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "content": result})
    return messages

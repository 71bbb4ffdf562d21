"""A catalogue of twelve tools and six ways to change it, for measuring what a change costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Tool = dict[str, Any]

_SPECS = (
    ("book_hotel", "Book a hotel room for a number of nights", "city:string nights:integer guests:integer"),
    ("convert_currency", "Convert an amount between two currencies at today's rate", "amount:number source:string target:string"),  # noqa: E501
    ("create_reminder", "Remind the user of something at a time", "text:string when:string"),
    ("find_flights", "List flights between two airports on a date, the cheapest first", "origin:string destination:string date:string"),  # noqa: E501
    ("get_weather", "Get the weather forecast of a city", "city:string days:integer"),
    ("list_files", "List the files of a folder that match a pattern", "folder:string pattern:string"),
    ("play_music", "Play a song or an album on the speakers of a room", "title:string room:string"),
    ("read_page", "Fetch a web page and give its text", "url:string"),
    ("run_query", "Run a read-only SQL query on the sales database", "query:string limit:integer"),
    ("send_mail", "Send a mail to one or more people", "to:string subject:string body:string"),
    ("set_thermostat", "Set the temperature of a room in degrees Celsius", "room:string temperature:number"),
    ("translate_text", "Translate a text into another language", "text:string language:string"),
)  # fmt: skip


def _tool(name: str, description: str, fields: str) -> Tool:
    kinds = dict(field.split(":") for field in fields.split())
    properties = {
        key: {"type": kind, "description": f"The {key} to use; leave nothing out."} for key, kind in kinds.items()
    }
    parameters = {"type": "object", "properties": properties, "required": list(kinds)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


CATALOGUE: tuple[Tool, ...] = tuple(_tool(*spec) for spec in _SPECS)
"""Twelve tools, sorted by name."""
_LAST = _tool("unit_converter", "Convert a quantity between two units", "quantity:number source:string target:string")
_FIRST = _tool("add_contact", "Add a person to the address book", "name:string mail:string")


def shuffled(value: Any) -> Any:
    """The same JSON with the keys of every object in reverse order."""
    if isinstance(value, dict):
        return {key: shuffled(inner) for key, inner in reversed(value.items())}
    return value


def changes(tools: Sequence[Tool] = CATALOGUE) -> dict[str, list[Tool]]:
    """The catalogue after each change, by the change's name."""
    some = list(tools)
    return {
        "nothing changed": some,
        "one appended": [*some, _LAST],
        "one inserted first": [_FIRST, *some],
        "one removed": [*some[:4], *some[5:]],
        "two swapped": [*some[:3], some[8], *some[4:8], some[3], *some[9:]],
        "keys of one shuffled": [*some[:6], shuffled(some[6]), *some[7:]],
    }

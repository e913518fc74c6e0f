"""Values that are given on the command line as table.key=value."""

from __future__ import annotations

import tomllib
from typing import Any


def name_and_value(words: str, option: str, example: str) -> tuple[str, str]:
    """Split `table.key=value` into its name and the text of its value.

    Args:
        words: What was given.
        option: The option that it was given to, for messages.
        example: What the option takes, for messages.
    """
    name, sign, text = (part.strip() for part in words.partition("="))
    parts = name.split(".")
    if not sign or len(parts) < 2 or not all(parts):
        raise ValueError(f"{option} takes table.key=value, such as {example}, got {words!r}")
    return name, text


def parse_value(text: str) -> Any:
    """Read a value; one that is not valid TOML is a string.

    Args:
        text: The value.

    Example:
        >>> parse_value("0.1"), parse_value("random")
        (0.1, 'random')
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def parse_values(text: str) -> list[Any]:
    """Read values with commas between them.

    Args:
        text: The values.

    Returns:
        The values; none if one of them is empty.

    Example:
        >>> parse_values("2, 3"), parse_values("random,balanced"), parse_values("[64, 10], [64, 16, 10]")
        ([2, 3], ['random', 'balanced'], [[64, 10], [64, 16, 10]])
    """
    try:
        return tomllib.loads(f"values = [{text}]")["values"]
    except tomllib.TOMLDecodeError:
        parts = [part.strip() for part in text.split(",")]
        return [parse_value(part) for part in parts] if all(parts) else []

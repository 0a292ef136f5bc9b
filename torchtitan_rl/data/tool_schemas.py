"""The JSON schemas of tools, as chat templates read them."""

from collections.abc import Callable, Sequence
from typing import Any

from torchtitan_rl.errors import UserError, expect

Tool = Callable[..., Any]


def tool_schemas(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Returns the tools' JSON schemas in the form that chat templates expect.

    Raises UserError if two tools have the same name, or an argument has no type hint or no description.
    """
    from transformers.utils import get_json_schema

    names = [getattr(tool, "__name__", repr(tool)) for tool in tools]
    expect(len({*names}) == len(names), "tools", names, "one tool of each name", "Rename one.")
    schemas = []
    for tool, name in zip(tools, names, strict=True):
        try:
            schemas.append(get_json_schema(tool))
        except Exception as error:
            raise UserError(
                f"tools: {name}: expected a function with type hints and a Google-style docstring with a line for each "
                f"argument: {error}"
            ) from error
    return schemas

"""The key `model.chat_template`: the name of one of our templates, a Jinja file, or a text."""

from pathlib import Path

_FOLDER = Path(__file__).parent / "templates"
TEMPLATE_NAMES = tuple(sorted(path.stem for path in _FOLDER.glob("*.jinja")))
"""Names of the templates that come with Turnwise."""
_JINJA = ("{{", "{%")


def template_text(value: str) -> str:
    """Return the Jinja text of a name, a file or a text.

    Raises:
        ValueError: when it is none of them.

    Example:
        >>> "<tool_call>" in template_text("hermes")
        True
    """
    if _is_jinja(value):
        return value
    path = _FOLDER / f"{value}.jinja" if value in TEMPLATE_NAMES else Path(value).expanduser()
    try:
        text = path.read_text()
    except (OSError, ValueError) as error:
        names = ", ".join(TEMPLATE_NAMES)
        raise ValueError(
            f"there is no template {repr(value)[:80]}: it may be {names}, a Jinja file, or its text"
        ) from error
    if not _is_jinja(text):
        raise ValueError(f"{value} is no chat template: it has neither {{{{ nor {{%")
    return text


def _is_jinja(text: str) -> bool:
    return any(mark in text for mark in _JINJA)

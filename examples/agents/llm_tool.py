"""The calculator as `llm --functions` reads it: every public name of this file becomes a tool."""


def calculate(a: int, operation: str, b: int) -> str:
    """Calculates a + b, a - b or a * b."""
    return str({"+": a + b, "-": a - b, "*": a * b}[operation])

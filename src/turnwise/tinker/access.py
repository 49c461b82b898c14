"""The key of Tinker's clients, and the paths that need no key."""

from starlette.datastructures import Headers

from turnwise.serving.openai.protection import Access

FILES = "/api/v1/files/"
"""Beginning of the paths of links to files; each of these paths ends in a secret."""


class TinkerAccess(Access):
    """Checks the server's key, which Tinker's clients send in their own header or in a token."""

    def is_open(self, path: str) -> bool:
        return super().is_open(path) or path.startswith(FILES)

    def authorization(self, path: str, headers: Headers) -> str:
        if path.startswith("/api/v1/") and (own := headers.get("x-api-key")):
            return f"Bearer {key_in(own)}"
        return super().authorization(path, headers)


def key_in(token: str) -> str:
    """Return the key in a token HEADER.CLAIMS.KEY; return a plain key unchanged."""
    parts = token.split(".", 2)
    return parts[2] if len(parts) == 3 and token.startswith("eyJ") else token

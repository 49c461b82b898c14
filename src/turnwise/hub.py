"""The Hugging Face Hub: which names may be on it, and whether it can be reached.

Its own libraries try for half a minute where there is no network; one look that takes at most
`_SECONDS` decides instead whether they ask the Hub or only its cache on this machine.
"""

import os
import re
import sys
import threading
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

_NAME = re.compile(r"(?:\b[\w.-]+\b/)?\b[\w.-]{1,96}\b", re.ASCII)
_SECONDS = 3.0
_TRUE = ("1", "ON", "YES", "TRUE")
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def may_be_on_hub(name: str) -> bool:
    """Whether it is written as name or organisation/name."""
    return _NAME.fullmatch(name) is not None and "--" not in name and ".." not in name


def why_offline() -> str:
    """Why only the Hub's cache on this machine is looked into, in half a sentence; "" if it is not.

    Where the Hub does not answer, this process and those that it starts ask it no more.
    """
    if any(os.environ.get(variable, "").upper() in _TRUE for variable in _OFFLINE):
        return "HF_HUB_OFFLINE is set"
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if _answers(endpoint):
        return ""
    _go_offline()
    return f"{endpoint} cannot be reached"


def _answers(url: str) -> bool:
    """Whether a server answers at all; the proxies of the environment are used."""
    answers: list[bool] = []

    def look() -> None:
        try:
            urlopen(Request(url, method="HEAD"), timeout=_SECONDS).close()
        except HTTPError:
            answers.append(True)
        except URLError as error:
            # A certificate that only the Hub's own client trusts is an answer too.
            answers.append("CERTIFICATE" in str(error.reason).upper())
        except OSError:
            answers.append(False)
        else:
            answers.append(True)

    # Looking up an address has no deadline of its own.
    thread = threading.Thread(target=look, daemon=True, name="turnwise-hub")
    thread.start()
    thread.join(_SECONDS)
    return any(answers)


def _go_offline() -> None:
    """Let Hugging Face's libraries use their cache alone, those that are imported included."""
    os.environ[_OFFLINE[0]] = "1"
    for module in ("huggingface_hub.constants", "datasets.config"):
        if module in sys.modules:
            sys.modules[module].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]

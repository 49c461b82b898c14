"""Memory that this process has freed, and the C library keeps."""

import ctypes


def give_back() -> None:
    """Give memory that was freed back to the system, where the C library can (glibc).

    glibc keeps freed blocks of up to 32 MiB for later ones; after a phase with many of them, such
    as the loading of a model, the process would stay as large as it was at its peak.

    Example:
        del model
        give_back()
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

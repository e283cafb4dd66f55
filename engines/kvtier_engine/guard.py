"""Where work for one request ends what goes wrong in it: the error becomes a value, and is logged.

Promise: what a library, a device or a caller's function raises, of whatever kind, ends nothing but
the work it was raised in. EngineInconsistent alone goes on: the engine's own accounts are wrong
then. Safe from any thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from kvtier_engine.errors import EngineInconsistent

__all__ = ["attempted"]

log = logging.getLogger(__name__)

R = TypeVar("R")


def attempted(work: Callable[[], R], what: str | None) -> R | Exception:
    """What `work` returns, or what it raised: logged in full under `what`, unless None.

    Raises EngineInconsistent, and what is no Exception (say KeyboardInterrupt).
    """
    try:
        return work()
    except EngineInconsistent:
        raise
    except Exception as error:
        if what is not None:
            log.exception("engine.%s_failed", what)
        return error

"""The border to SGLang's scheduler and its threads: nothing that goes wrong here goes on there.

An exception in a storage backend ends one of the scheduler's threads or the scheduler. A cache that
fails is a cache that has nothing. Usable from any thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

__all__ = ["answers", "kept_inside"]

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


def answers(instead: Callable[..., T]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A method that gives `instead` of its arguments where it would have raised, and logs why."""

    def guard(method: Callable[P, T]) -> Callable[P, T]:
        @wraps(method)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return method(*args, **kwargs)
            except Exception:
                log.exception("kvtier: %s failed and counts as a miss", method.__name__)
                return instead(*args[1:], **kwargs)  # all but `self`

        return guarded

    return guard


@contextmanager
def kept_inside(what: str, otherwise: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Around what may raise and must not: then `what` is logged, and `otherwise` is done."""
    try:
        yield
    except Exception:
        log.exception("kvtier: %s failed", what)
        otherwise()

"""transformers shows progress with tqdm, whose monitor thread nobody ends."""

from __future__ import annotations

import pytest

tqdm = pytest.importorskip("tqdm")
tqdm.tqdm.monitor_interval = 0

"""What a program that uses the library reads in its log of shared memory that is not there."""

from __future__ import annotations

import asyncio
import logging

from kvtier.client.local_attachment import LocalAttachment


def test_an_attachment_that_fails_says_so_once_in_a_sentence(tmp_path, monkeypatch, caplog):
    """However often it is tried again; `local` goes on saying why."""
    monkeypatch.setattr("kvtier.client.local_attachment._RETRY_S", 0.0)
    caplog.set_level(logging.DEBUG, logger="kvtier.client")

    def told() -> list[logging.LogRecord]:
        return [r for r in caplog.records if getattr(r, "event", "") == "local.not_attached"]

    async def outage() -> None:
        attachment = LocalAttachment("test", is_wanted=True)
        attachment.offered(str(tmp_path / "none.sock"), 1)
        async with asyncio.timeout(30):
            while len(told()) < 3:
                assert attachment.reads(1) is None
                await asyncio.sleep(0.01)
        assert str(tmp_path) in attachment.state.reason
        await attachment.close()

    asyncio.run(outage())
    levels = [record.levelno for record in told()]
    assert levels[:3] == [logging.WARNING, logging.DEBUG, logging.DEBUG]
    text = told()[0].getMessage()
    assert text.startswith("shared memory is not used, calls go over gRPC: ")
    assert told()[0].why in text
    assert text.endswith(told()[0].remedy)

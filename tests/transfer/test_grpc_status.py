"""An error keeps its class, text and remedy over the wire; a foreign status becomes the nearest
class.
"""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from kvtier import errors
from kvtier.transfer.grpc_status import ERROR_KEY, code_of, from_rpc_error, to_status


def rpc_error(code, details="", metadata=()):
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), details)


@pytest.mark.parametrize("kind", errors.leaves(), ids=lambda kind: kind.__name__)
def test_every_error_has_one_status_and_comes_back_as_itself(kind):
    error = kind("page 3 of tenant 'ä'", remedy="do 50 % less, → then retry")
    code, details, metadata = to_status(error)
    assert code is code_of(error)
    back = from_rpc_error(rpc_error(code, details, metadata))
    assert type(back) is kind
    assert str(back) == str(error)
    assert back.remedy == error.remedy


@pytest.mark.parametrize(
    "remedy", ["line\nbreak\r\x00\x7f", "100%25 %", "日本語" * 500, "\udc80lone"]
)
def test_metadata_is_printable_ascii_and_bounded(remedy):
    _, details, metadata = to_status(errors.Busy("x" * 10_000, remedy=remedy))
    for name, value in metadata:
        assert name == name.lower()
        assert all(0x20 <= ord(char) <= 0x7E for char in value)
    assert len(details) <= 1024
    assert sum(len(value) for _, value in metadata) < 4096


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.DaemonUnavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.Busy),
        (grpc.StatusCode.UNIMPLEMENTED, errors.NotImplementedYet),
        (grpc.StatusCode.NOT_FOUND, errors.UnknownHandle),
        (grpc.StatusCode.INTERNAL, errors.DaemonUnavailable),
        (grpc.StatusCode.UNKNOWN, errors.DaemonUnavailable),
        (grpc.StatusCode.CANCELLED, errors.DaemonUnavailable),
        (grpc.StatusCode.PERMISSION_DENIED, errors.DaemonUnavailable),
    ],
)
def test_a_status_without_our_metadata(code, kind):
    error = from_rpc_error(rpc_error(code, "connection refused"))
    assert type(error) is kind
    assert str(error) == "connection refused"
    assert error.remedy


def test_every_status_code_becomes_some_error():
    for code in grpc.StatusCode:
        if code is not grpc.StatusCode.OK:
            error = from_rpc_error(rpc_error(code))
            assert isinstance(error, errors.KvtierError)
            assert code.name in str(error)


@pytest.mark.parametrize("name", ["KvtierError", "InvalidInput", "Nonsense", "Busy"])
def test_a_class_that_does_not_fit_the_status_is_not_believed(name):
    error = from_rpc_error(rpc_error(grpc.StatusCode.UNAVAILABLE, "gone", [(ERROR_KEY, name)]))
    assert type(error) is errors.DaemonUnavailable


def test_a_message_over_the_transport_limit_is_a_limit():
    details = "CLIENT: Sent message larger than max (20 vs. 10)"
    error = from_rpc_error(rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, details))
    assert type(error) is errors.LimitExceeded

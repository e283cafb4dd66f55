"""Every field that makes a family makes another one: no page is ever found under a family that
differs in one of them. A field that is new in the protocol needs a row here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from google.protobuf.descriptor import Descriptor
from raw_calls import key_of, payload_of, put_page

from kvtier.packing.layout import Role, ScaleRule
from kvtier.v1 import page_pb2, pages_pb2

HIT, MISS = 1, 2
Request = pages_pb2.OpenNamespaceRequest

#: Not of the family: who asks, a check value, and which part of the family's pages this is.
NOT_FAMILY = {"session_id", "client_name", "fingerprint", "shard"}


def base() -> Request:
    """Pages of 1 KiB, so that all records here have one size and none has to give way."""
    segment = page_pb2.Segment(
        name="k", role=int(Role.KEY), dtype="bfloat16", layers=2, heads=2, dim=64,
        scale_rule=int(ScaleRule.LAYER_HEAD),
    )  # fmt: skip
    layout = page_pb2.Layout(
        model_id="model", weights_revision="1", adapter_id="adapter", adapter_revision="1",
        kv_compute="bfloat16", rope="none", key_scheme="sha256-chain-u32", page_tokens=4,
        storage_order="LTHD", segments=[segment], shard_count=2,
    )  # fmt: skip
    shard = page_pb2.Shard(index=0, layer_start=0, layer_end=1, head_start=0, head_end=2)
    return Request(tenant="acme", salt=b"salt", layout=layout, shard=shard)


def setting(path: str, value: object) -> Callable[[Request], None]:
    """Sets the field at `path`; segments: those of the first one."""

    def change(request: Request) -> None:
        *parents, name = path.split(".")
        message = request
        for parent in parents:
            message = getattr(message, parent)
            message = message[0] if parent == "segments" else message
        assert getattr(message, name) != value, path
        setattr(message, name, value)

    return change


def second_segment(request: Request) -> None:
    other = page_pb2.Segment()
    other.CopyFrom(request.layout.segments[0])
    other.name = "k2"
    request.layout.segments.append(other)


OTHER_VALUES: dict[str, object] = {
    "tenant": "acme2",
    "salt": b"pepper",
    "layout.model_id": "model2",
    "layout.weights_revision": "2",
    "layout.adapter_id": "adapter2",
    "layout.adapter_revision": "2",
    "layout.kv_compute": "float8_e4m3fn",
    "layout.rope": "yarn",
    "layout.key_scheme": "other",
    "layout.page_tokens": 8,
    "layout.storage_order": "LHTD",
    "layout.shard_count": 3,
    "layout.segments.name": "v",
    "layout.segments.role": int(Role.VALUE),
    "layout.segments.dtype": "float16",
    "layout.segments.layers": 3,
    "layout.segments.heads": 4,
    "layout.segments.dim": 128,
    "layout.segments.scale_rule": int(ScaleRule.NONE),
}


def family_fields(descriptor: Descriptor, prefix: str = "") -> Iterator[str]:
    """The path of every field that holds a value and is not named in NOT_FAMILY."""
    for field in descriptor.fields:
        path = prefix + field.name
        if path in NOT_FAMILY:
            continue
        if field.message_type is None:
            yield path
        else:
            yield from family_fields(field.message_type, path + ".")


def test_every_field_of_the_protocol_has_a_row():
    assert set(family_fields(Request.DESCRIPTOR)) == set(OTHER_VALUES)


def test_no_page_is_found_under_a_family_that_differs_in_one_field(client):
    requests = {"base": base(), "layout.segments": base()}
    second_segment(requests["layout.segments"])
    for path, value in OTHER_VALUES.items():
        requests[path] = base()
        setting(path, value)(requests[path])
    families = {}
    for path, request in requests.items():
        request.session_id = client.session
        families[path] = client.call("OpenNamespace", request)
        client.session = families[path].session_id
    assert len({opened.fingerprint for opened in families.values()}) == len(families)
    assert len(client.status().namespaces) == len(families)
    keys = {path: key_of(path) for path in families}
    for path, opened in families.items():
        payload = payload_of(path, opened.raw_bytes)
        put = client.put_pages(opened, [(put_page(opened, keys[path], payload), payload)])
        assert list(put.codes) == [1], path
    for path, opened in families.items():
        got = client.get(opened, list(keys.values()))
        found = {name for name, code in zip(keys, got.codes, strict=True) if code == HIT}
        assert found == {path}
        assert set(got.codes) == {HIT, MISS}
        assert list(got.payloads.values()) == [payload_of(path, opened.raw_bytes)]


def test_the_same_request_is_the_same_family(client):
    first = client.call("OpenNamespace", base())
    again = client.call("OpenNamespace", base())
    assert (again.fingerprint, again.generation) == (first.fingerprint, first.generation)
    assert again.session_id != first.session_id

"""The store as it is, through bare stubs: no code of etcdfence but the generated messages is on this path."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import grpc

from etcdfence.transports._pb import etcdfence_wire_pb2 as pb


class Raw:
    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.channel = grpc.insecure_channel(
            endpoint.removeprefix("http://"), options=[("grpc.enable_http_proxy", 0)]
        )

    def stub(self, path: str, request: Any, reply: Any) -> Any:
        return self.channel.unary_unary(
            f"/etcdserverpb.{path}",
            request_serializer=request.SerializeToString,
            response_deserializer=reply.FromString,
        )

    def txn(self, request: Any) -> Any:
        return self.stub("KV/Txn", pb.TxnRequest, pb.TxnResponse)(request, timeout=5)

    def range(self, key: bytes, range_end: bytes = b"") -> list[Any]:
        found = self.stub("KV/Range", pb.RangeRequest, pb.RangeResponse)(
            pb.RangeRequest(key=key, range_end=range_end), timeout=5
        )
        return list(found.kvs)

    def get(self, key: bytes) -> Any:
        """The key's KeyValue message, or None."""
        found = self.range(key)
        return found[0] if found else None

    def below(self, prefix: bytes) -> list[bytes]:
        return [kv.key for kv in self.range(prefix, prefix[:-1] + bytes([prefix[-1] + 1]))]

    def revisions(self, prefix: bytes) -> dict[bytes, int]:
        """Every key below a prefix that ends in "/", with its mod revision."""
        return {kv.key: kv.mod_revision for kv in self.range(prefix, prefix[:-1] + b"0")}

    def put(self, key: bytes, value: bytes, lease: int = 0) -> None:
        self.stub("KV/Put", pb.PutRequest, pb.PutResponse)(
            pb.PutRequest(key=key, value=value, lease=lease), timeout=5
        )

    def delete(self, key: bytes) -> int:
        """What `etcdctl del` does."""
        reply = self.stub("KV/DeleteRange", pb.DeleteRangeRequest, pb.DeleteRangeResponse)(
            pb.DeleteRangeRequest(key=key), timeout=5
        )
        return int(reply.deleted)

    def revoke(self, lease_id: int) -> None:
        """What `etcdctl lease revoke` does."""
        self.stub("Lease/LeaseRevoke", pb.LeaseRevokeRequest, pb.LeaseRevokeResponse)(
            pb.LeaseRevokeRequest(ID=lease_id), timeout=5
        )

    def ttl(self, lease_id: int) -> int:
        reply = self.stub("Lease/LeaseTimeToLive", pb.LeaseTimeToLiveRequest, pb.LeaseTimeToLiveResponse)(
            pb.LeaseTimeToLiveRequest(ID=lease_id), timeout=5
        )
        return int(reply.TTL)

    def revision(self) -> int:
        reply = self.stub("KV/Range", pb.RangeRequest, pb.RangeResponse)(pb.RangeRequest(key=b"x"), timeout=5)
        return int(reply.header.revision)

    def compact(self) -> None:
        self.gateway("/v3/kv/compaction", {"revision": str(self.revision()), "physical": True})

    def gateway(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """A call that the stubs have no messages for, through etcd's HTTP gateway."""
        request = urllib.request.Request(f"{self.endpoint}{path}", json.dumps(body).encode())
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=10) as reply:
            answer: dict[str, Any] = json.loads(reply.read())
            return answer

    def close(self) -> None:
        self.channel.close()

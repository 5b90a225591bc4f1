"""Another etcd client as the descriptor pool sees it: importing it takes etcd's file and package names.

What it puts under these names is nothing of etcd's, so that whoever registers them again, or relies on finding
etcd's messages under them, is found out.
"""

from __future__ import annotations

from typing import Final

from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

from .beside import TAKEN

MESSAGES: Final = {"mvccpb": ("KeyValue", "Event"), "authpb": ("User",), "etcdserverpb": ("TxnRequest", "Compare")}


def take(field: str) -> None:
    """Register all of these names, with messages that have this one field."""
    for file, package in TAKEN.items():
        proto = FileDescriptorProto(name=file, package=package, syntax="proto3")
        for message in MESSAGES[package]:
            proto.message_type.add(name=message).field.add(
                name=field,
                number=1,
                type=FieldDescriptorProto.TYPE_STRING,
                label=FieldDescriptorProto.LABEL_OPTIONAL,
            )
        descriptor_pool.Default().AddSerializedFile(proto.SerializeToString())


take("not_what_etcd_has_here")

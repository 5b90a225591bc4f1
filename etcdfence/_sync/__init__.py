"""Coordinator and Lease for threads."""

from etcdfence._sync.coordinator import Coordinator, Identity
from etcdfence._sync.engine import Engine
from etcdfence._sync.lease import Lease, Transaction

__all__ = ["Coordinator", "Engine", "Identity", "Lease", "Transaction"]

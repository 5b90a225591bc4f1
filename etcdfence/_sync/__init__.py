"""Coordinator and Lease for threads."""

from etcdfence._sync.coordinator import Coordinator
from etcdfence._sync.engine import SyncEngine
from etcdfence._sync.lease import Lease, Transaction

__all__ = ["Coordinator", "Lease", "SyncEngine", "Transaction"]

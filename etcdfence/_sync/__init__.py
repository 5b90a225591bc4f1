"""Coordinator and Lease for threads."""

from etcdfence._sync.coordinator import Coordinator
from etcdfence._sync.engine import SyncEngine
from etcdfence._sync.leadership import Leadership
from etcdfence._sync.lease import Lease, Transaction
from etcdfence._sync.session import Session

__all__ = ["Leadership", "Session", "Coordinator", "Lease", "SyncEngine", "Transaction"]

"""The ledger: runs at a glance, exports."""

"""The ledger: runs at a glance, receipts, leaderboards, exports."""

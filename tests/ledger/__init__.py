"""The ledger: runs at a glance, leaderboards, exports."""

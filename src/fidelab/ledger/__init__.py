"""All runs of a folder at a glance, and what leaves a run for others: receipts and files of other tools."""

"""All runs of a folder at a glance, and files to share: receipts and files for other tools."""

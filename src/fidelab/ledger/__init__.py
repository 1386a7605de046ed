"""All runs of a folder at a glance, and packs of references."""

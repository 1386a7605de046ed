"""The shipped text ``agents``: long documents as agents and long contexts have them."""

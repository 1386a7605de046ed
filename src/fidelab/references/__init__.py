"""References: saved outputs of one configuration, packed for others and borrowed from them."""

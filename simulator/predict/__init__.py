"""How long one op, or a collective on a cluster's links, takes."""

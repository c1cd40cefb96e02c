"""A fleet as one node: the head takes jobs as a node does, and has the fleet's nodes, its members, work on them."""

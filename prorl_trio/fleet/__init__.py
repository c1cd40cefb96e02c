"""A fleet behaves like one node: the head accepts jobs as a node does, and its members, the fleet's nodes, run them."""

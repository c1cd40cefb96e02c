"""Sessions: what a trainer submitted, and the outcomes that it is owed."""

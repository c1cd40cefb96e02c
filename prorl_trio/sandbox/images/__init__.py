"""Images of sandboxes: the store of those that were pulled, built, unpacked or put together from layers."""

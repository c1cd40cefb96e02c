"""Images of sandboxes: the store of pulled, built, unpacked and composed images."""

"""The APIs that agents speak: each a translator between a wire and the gateway of a rollout."""

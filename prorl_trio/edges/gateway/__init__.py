"""The APIs for agents. Each module translates between a wire format and the gateway of a rollout."""

"""The entry point that NeMo Gym starts."""

from nemo_gym.server_utils import is_nemo_gym_fastapi_entrypoint

from prorl_trio.integrations.nemo_gym.agent import ProRLTrioAgent

if __name__ == "__main__":
    ProRLTrioAgent.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = ProRLTrioAgent.run_webserver()

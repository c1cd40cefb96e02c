"""The module of a handler as a user writes one, and of one with a bug."""

MODULE = """
from prorl_trio import AgentHandler, ChatMessage, Evaluation, FinishTool, ToolSet, run_agent

class SupportHandler(AgentHandler):
    name = "support"

    def validate(self, payload):
        payload["request"]

    def sandbox_spec(self, context):
        return None

    async def init(self, context):
        pass

    async def run(self, context):
        request = [ChatMessage(role="user", content=context.spec.instance.payload["request"])]
        await run_agent(context, request, ToolSet([FinishTool()], max_observation_chars=99))

    async def eval(self, context):
        context.log_evaluation("it was looked at")
        said = context.turns[0].text
        return Evaluation(reward=float("help" in said), details={})

class Broken(SupportHandler):
    async def run(self, context):
        return {}["nothing"]
"""

"""What agents do all day: chats, streams, tools, structured output, in each SDK's own words."""

import asyncio
from typing import Literal

import agents
import anthropic
import instructor
import litellm
import openai
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

pytestmark = pytest.mark.filterwarnings("ignore")  # the SDKs' own
MODEL = "mock"
HI = [{"role": "user", "content": "hi"}]
RESULT = "sunny " * 50
"""What tools return. A prompt has a token for each of its bytes, so the server shows that it got it."""


class Step(BaseModel):
    """A step of a plan, with everything that schemas of such classes have."""

    answer: str
    kind: Literal["look", "ask"]
    certainty: float = Field(ge=0, le=1)
    needs: list[str] = Field(default_factory=list, max_length=4)
    after: "Step | None" = None


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Look out of the window",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


@pytest.fixture
def client(url):
    with OpenAI(max_retries=0) as client:
        yield client


class TestOpenAI:
    def test_a_turn_is_sent_back_as_it_came(self, client):
        answer = client.chat.completions.create(model=MODEL, messages=HI, max_tokens=5).choices[0].message
        for turn in (answer, answer.model_dump()):
            messages = [*HI, turn, {"role": "user", "content": "more"}]
            assert (
                client.chat.completions.create(model=MODEL, messages=messages, max_tokens=5).choices[0].message.content
            )

    def test_streams_with_its_helper(self, client):
        with client.chat.completions.stream(model=MODEL, messages=HI) as stream:
            text = "".join(event.delta for event in stream if event.type == "content.delta")
            assert stream.get_final_completion().choices[0].message.content == text

    def test_a_required_tool_is_called(self, client):
        asked = {"model": MODEL, "messages": HI, "tools": [WEATHER], "max_tokens": 60}
        for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
            [call] = (
                client.chat.completions.create(**asked, tool_choice=choice, parallel_tool_calls=False)
                .choices[0]
                .message.tool_calls
            )
            assert call.function.name == "get_weather"

    def test_a_tools_result_is_sent_back(self, client):
        asked = {"model": MODEL, "tools": [WEATHER], "max_tokens": 60}
        turn = client.chat.completions.create(**asked, messages=HI, tool_choice="required").choices[0].message

        def read(result):
            results = [{"role": "tool", "tool_call_id": call.id, "content": result} for call in turn.tool_calls]
            return client.chat.completions.create(**asked, messages=[*HI, turn, *results], tool_choice="none")

        answer = read(RESULT)
        assert answer.choices[0].message.content
        assert (
            answer.usage.prompt_tokens - read("").usage.prompt_tokens
            == len(RESULT) * len(turn.tool_calls)
            >= len(RESULT)
        )

    def test_a_response_reads_a_tools_result(self, client):
        asked = {"model": MODEL, "max_output_tokens": 60, "tools": [{"type": "function", **WEATHER["function"]}]}
        first = client.responses.create(**asked, input="hi", tool_choice="required", parallel_tool_calls=False)
        [call] = [item for item in first.output if item.type == "function_call"]

        def read(result):
            output = {"type": "function_call_output", "call_id": call.call_id, "output": result}
            return client.responses.create(**asked, input=[output], previous_response_id=first.id, tool_choice="none")

        answer = read(RESULT)
        assert answer.output_text and call.name == "get_weather"
        assert answer.usage.input_tokens - read("").usage.input_tokens == len(RESULT)

    def test_parse_gives_an_object(self, client):
        parsed = client.chat.completions.parse(model=MODEL, messages=HI, response_format=Step, max_tokens=300)
        assert isinstance(parsed.choices[0].message.parsed, Step)

    def test_responses_continue_each_other(self, client):
        first = client.responses.create(model=MODEL, input="hi", max_output_tokens=16)
        second = client.responses.create(model=MODEL, input="more", previous_response_id=first.id, max_output_tokens=16)
        assert first.output_text and second.output_text
        assert second.usage.input_tokens > first.usage.input_tokens

    def test_responses_stream_and_parse(self, client):
        with client.responses.stream(model=MODEL, input="hi", max_output_tokens=16) as stream:
            kinds = [event.type for event in stream]
        assert kinds[0] == "response.created" and "response.output_text.delta" in kinds
        assert isinstance(client.responses.parse(model=MODEL, input="hi", text_format=Step).output_parsed, Step)

    def test_embeddings(self, client):
        first, second = client.embeddings.create(model=MODEL, input=["hi", "ho"]).data
        assert len(first.embedding) == len(second.embedding) and first.embedding != second.embedding


class TestAnthropic:
    @pytest.fixture
    def claude(self, url):
        with anthropic.Anthropic(base_url=url, api_key="x", max_retries=0) as client:
            yield client

    def test_messages_and_streams(self, claude):
        asked = {"model": MODEL, "max_tokens": 8, "messages": HI}
        whole = claude.messages.create(**asked)
        with claude.messages.stream(**asked) as stream:
            assert "".join(stream.text_stream) == whole.content[0].text
        assert whole.usage.output_tokens == 8 and whole.stop_reason == "max_tokens"

    def test_a_tool_is_used_and_its_result_read(self, claude):
        tool = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}
        asked = {"model": MODEL, "max_tokens": 60, "tools": [tool]}
        used = claude.messages.create(**asked, messages=HI, tool_choice={"type": "any"})
        blocks = [block for block in used.content if block.type == "tool_use"]
        assert {block.name for block in blocks} == {"get_weather"}

        def read(result):
            results = [{"type": "tool_result", "tool_use_id": block.id, "content": result} for block in blocks]
            messages = [*HI, {"role": "assistant", "content": used.content}, {"role": "user", "content": results}]
            return claude.messages.create(**asked, messages=messages, tool_choice={"type": "none"})

        def num_input(answer):
            return answer.usage.input_tokens + answer.usage.cache_read_input_tokens

        answer = read(RESULT)
        assert answer.content[0].text
        assert num_input(answer) - num_input(read("")) == len(RESULT) * len(blocks)

    def test_tokens_are_counted(self, claude):
        assert claude.messages.count_tokens(model=MODEL, messages=HI).input_tokens > 2


class TestLangChain:
    def chat(self, **more):
        return ChatOpenAI(model=MODEL, max_retries=0, **more)

    def test_it_invokes_and_streams(self):
        text = self.chat(max_tokens=5).invoke("hi").content
        assert "".join(chunk.content for chunk in self.chat(max_tokens=5, stream_usage=True).stream("hi")) == text

    def test_tools_go_round(self):
        must = self.chat(max_tokens=60).bind_tools([WEATHER], tool_choice="required")
        turn = must.invoke("hi")
        assert {call["name"] for call in turn.tool_calls} == {"get_weather"}

        def read(result):
            results = [ToolMessage(result, tool_call_id=call["id"]) for call in turn.tool_calls]
            answers = self.chat(max_tokens=60).bind_tools([WEATHER], tool_choice="none")
            return answers.invoke([HumanMessage("hi"), turn, *results])

        answer, short = read(RESULT), read("")
        assert answer.content
        growth = answer.usage_metadata["input_tokens"] - short.usage_metadata["input_tokens"]
        assert growth == len(RESULT) * len(turn.tool_calls)

    def test_a_stream_of_a_call_is_one_call(self):
        must = self.chat(max_tokens=60).bind_tools([WEATHER], tool_choice="required", parallel_tool_calls=False)
        first, *others = must.stream("hi")
        [call] = sum(others, first).tool_calls
        assert call["name"] == "get_weather" and isinstance(call["args"]["city"], str)

    @pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
    def test_structured_output(self, method):
        found = self.chat().with_structured_output(Step if method != "json_mode" else None, method=method).invoke("hi")
        assert isinstance(found, dict if method == "json_mode" else Step)

    def test_embeddings(self):
        found = OpenAIEmbeddings(model=MODEL, check_embedding_ctx_length=False).embed_documents(["hi", "ho"])
        assert len(found) == 2


class TestLiteLlm:
    def ask(self, url, **more):
        return litellm.completion(model=f"openai/{MODEL}", api_base=f"{url}/v1", api_key="x", num_retries=0, **more)

    def test_it_completes_and_streams(self, url):
        text = self.ask(url, messages=HI, max_tokens=5).choices[0].message.content
        pieces = [
            chunk.choices[0].delta.content or "" for chunk in self.ask(url, messages=HI, max_tokens=5, stream=True)
        ]
        assert "".join(pieces) == text

    def test_a_tool_goes_round(self, url):
        asked = {"tools": [WEATHER], "max_tokens": 60}
        turn = self.ask(url, messages=HI, tool_choice="required", **asked).choices[0].message
        assert {call.function.name for call in turn.tool_calls} == {"get_weather"}

        def read(result):
            results = [{"role": "tool", "tool_call_id": call.id, "content": result} for call in turn.tool_calls]
            return self.ask(url, messages=[*HI, turn, *results], tool_choice="none", **asked)

        answer = read(RESULT)
        assert answer.choices[0].message.content
        assert answer.usage.prompt_tokens - read("").usage.prompt_tokens == len(RESULT) * len(turn.tool_calls)

    def test_as_vllm(self, url):
        asked = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{url}/v1", "api_key": "x"}
        assert litellm.completion(**asked, messages=HI, max_tokens=5).choices[0].message.content

    def test_anthropics_messages_over_openais_api(self, url):
        asked = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "x"}
        answer = asyncio.run(litellm.anthropic.messages.acreate(**asked, messages=HI, max_tokens=16))
        assert answer["content"]


class TestInstructor:
    @pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
    def test_objects(self, mode):
        client = instructor.from_openai(OpenAI(max_retries=0), mode=mode)
        asked = {"model": MODEL, "messages": HI, "max_retries": 1}
        assert isinstance(client.chat.completions.create(**asked, response_model=Step), Step)


class TestPydanticAi:
    @pytest.fixture(params=[OpenAIChatModel, OpenAIResponsesModel])
    def model(self, url, request):
        return request.param(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="x"))

    def test_text(self, model):
        assert Agent(model, model_settings={"max_tokens": 20}).run_sync("hi").output

    def test_an_output_type(self, model):
        assert isinstance(Agent(model, output_type=Step).run_sync("hi").output, Step)

    def test_an_agent_calls_a_tool_reads_its_result_and_comes_to_an_end(self, model):
        agent, rolled = Agent(model), []

        @agent.tool_plain
        def roll(sides: int) -> str:
            rolled.append(sides)
            return RESULT

        for number in range(6):  # the model decides by the prompt: it calls for some of these
            before = len(rolled)
            run = agent.run_sync(f"roll {number}")
            prompts = [turn.usage.input_tokens for turn in run.all_messages() if turn.kind == "response"]
            assert run.output and prompts[-1] - prompts[0] >= (len(rolled) - before) * len(RESULT)
        assert rolled


class TestOpenAIAgents:
    @pytest.fixture(params=["chats", "responses"])
    def model(self, request):
        return (
            MODEL
            if request.param == "responses"
            else agents.OpenAIChatCompletionsModel(MODEL, AsyncOpenAI(max_retries=0))
        )

    def run(self, model, **more):
        agent = agents.Agent(name="a", instructions="i", model=model, **more)
        return asyncio.run(agents.Runner.run(agent, "hi", max_turns=20))

    def test_text(self, model):
        assert self.run(model).final_output

    def test_an_agent_calls_a_tool_reads_its_result_and_comes_to_an_end(self, model):
        rolled = []

        @agents.function_tool
        def dice() -> str:
            """Roll."""
            rolled.append(True)
            return RESULT

        must = agents.ModelSettings(tool_choice="required")  # for the first turn; the others are the model's choice
        run = self.run(model, tools=[dice], model_settings=must)
        prompts = [response.usage.input_tokens for response in run.raw_responses]
        assert run.final_output and rolled
        assert prompts[-1] - prompts[0] >= len(rolled) * len(RESULT)

    def test_an_output_type(self, model):
        class Out(BaseModel):
            a: str

        assert isinstance(self.run(model, output_type=Out).final_output, Out)


def test_errors_are_the_sdks_own(client):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="none", messages=HI)

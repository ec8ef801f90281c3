"""llama.cpp under constraints that would end its process."""

import openai
import pytest


def test_an_answer_that_cannot_go_on_fails_alone(stack):
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", timeout=120, max_retries=0) as client:

        def ask(**more):
            return client.completions.create(model="tiny", prompt="hello", max_tokens=8, temperature=0, **more)

        before = ask().choices[0].text
        nowhere = {"grammar": r'root ::= "a" "\x00"'}
        with pytest.raises(openai.APIError, match="no token can continue"):
            ask(extra_body={"structured_outputs": nowhere})
        assert ask().choices[0].text == before

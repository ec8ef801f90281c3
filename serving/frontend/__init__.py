"""The HTTP frontend: OpenAI's API, with the router inside."""

"""OpenAI's Responses API: its request as a chat request, its answer as events or one object, earlier responses."""

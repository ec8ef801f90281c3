"""Anthropic's Messages API: its request as a chat request, its answer as events or one object, its errors."""

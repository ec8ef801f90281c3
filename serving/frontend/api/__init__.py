"""The frontend's API: request types, errors, events, the OpenAPI schema."""

"""What clients and the frontend say to each other: request types, errors, events, the OpenAPI schema."""

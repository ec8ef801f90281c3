"""A process for each model that prepares requests that may take long."""

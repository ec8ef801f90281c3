"""A process for each model that prepares requests which may take long."""

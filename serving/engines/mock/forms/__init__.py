"""Made-up texts of a wanted form: values of JSON schemas, and texts that a regular expression matches."""

"""From a prompt to pieces of text: attempts at instances, migration, detokenizing, stop strings."""

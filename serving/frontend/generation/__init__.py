"""From a prompt to pieces of text: attempts on instances, migration, detokenizing, stop strings."""

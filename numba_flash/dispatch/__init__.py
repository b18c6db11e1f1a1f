"""The path of a call: from the caller's arguments to code that runs."""

"""The version of vLLM that was tested, in the trainer's process and as a server."""

TESTED_VERSION = "0.32.0"

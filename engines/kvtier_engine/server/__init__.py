"""The engine over HTTP, as OpenAI's clients speak it."""

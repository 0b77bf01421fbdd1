"""The HTTP server: OpenAI's API over an AsyncLLM. `app.build_app` makes the application, `lifecycle` runs it."""

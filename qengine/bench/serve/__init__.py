"""`qengine bench serve`: a running server under load, as its clients see it. Any server with OpenAI's API will do."""

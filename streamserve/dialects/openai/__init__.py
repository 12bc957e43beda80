"""The OpenAI API: chats, completions, files and batches, as the official client has them (openai 3.52, `types/`)."""

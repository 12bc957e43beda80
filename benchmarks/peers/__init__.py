"""Our site beside llama-server, vLLM and `transformers serve`, over HTTP, in turns. `python -m benchmarks.peers`."""

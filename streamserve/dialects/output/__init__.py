"""What bodies say of the output: the tools that a model may call, and what its text must match."""

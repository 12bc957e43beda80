"""The demo model: a fictional help desk's knowledge base, the corpus made from it, the training and the test of it."""

"""The words the corpus generator puts together: frames, small talk, off-topic questions, other languages. Data only."""

"""Questions to the assistant: those that nothing is tuned on, and those that its search was tuned on."""

"""Engine ``openai``: any server that speaks the OpenAI protocol."""

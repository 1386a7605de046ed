"""Load on a server that speaks the OpenAI protocol: the client, the drive, the server's own metrics."""

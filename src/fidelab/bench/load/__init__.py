"""Load on a server that speaks the OpenAI protocol: the client, the load run, and the server's own metrics."""

"""Published claims, judged by arithmetic: the file's schema, a table of checks, and the claims that come with fidelab."""

"""Published claims judged by arithmetic: a file's schema, a table of checks, the claims that come with fidelab."""

"""Ways to reach an agent: a child process here (`local`), and the client that speaks to it over any byte stream."""

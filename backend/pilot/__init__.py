"""The `--auto` driver on the host: decides what must run, shows it as a plan, runs it stage by stage, and says why."""

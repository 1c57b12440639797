"""What each command does: one module a command with `run(args) -> int`. The registry is `console.parser.COMMANDS`."""
